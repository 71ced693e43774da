"""Running the book, and the pages that are made of it."""
