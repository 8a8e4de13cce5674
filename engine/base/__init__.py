"""What everything else uses: errors, checks of arguments, threads, files. Knows no tables."""
