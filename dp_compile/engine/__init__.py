"""Every backward: which way it goes, its capture, its hooks; what ranks agree on, and who is waited for."""
