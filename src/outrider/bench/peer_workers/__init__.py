"""Workers of `bench peers`, which run in the environments of peers: scripts, not to be imported by Outrider."""
