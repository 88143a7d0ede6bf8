"""What a person looks at: progress, tables, plots. Needs the extras `cli` (rich) and `plots` (matplotlib)."""
