"""How each kind of head starts and learns: a file a kind, named like the drafter that runs it."""
