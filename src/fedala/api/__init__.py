"""The Python interface: `fedala.run` and its `Result`, in programs and in notebooks."""
