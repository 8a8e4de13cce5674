"""What commands read from the terminal and print to it: options, errors, reports."""
