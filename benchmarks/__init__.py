"""What is measured, how, and what came out: see README.md in this folder."""
