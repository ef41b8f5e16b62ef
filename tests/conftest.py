"""What all tests share."""

from hypothesis import settings

# One profile: a machine with busy neighbours finds no other faults than a quiet one.
settings.register_profile("foredraft", deadline=None)
settings.load_profile("foredraft")
