"""Evidence: what an evaluation leaves on disk, and how anybody checks it."""
