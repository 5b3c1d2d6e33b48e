"""Opens the pages of the demo in a browser, checks them, and takes the pictures of the documents."""
