"""What speculation would bring: drafters under loads, on this machine and on others."""
