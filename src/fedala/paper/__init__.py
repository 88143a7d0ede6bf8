"""The paper's tables and figures: as data, what runs them, and what puts the paper's numbers beside ours."""
