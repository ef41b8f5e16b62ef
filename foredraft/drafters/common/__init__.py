"""What several drafters share. Nothing here is a drafter."""
