"""How fast ranks are, and what share of each batch each gets; README.md says what is where."""
