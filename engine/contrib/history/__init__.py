"""Commands that ask commits what happened: history, blame, diff, branch."""
