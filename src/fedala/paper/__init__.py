"""The paper's tables and figures: as data, run, and compared with our numbers."""
