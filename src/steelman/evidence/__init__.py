"""Evidence: the folder that an evaluation writes, and the code that checks it."""
