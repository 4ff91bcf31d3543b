"""The picture of one run, ``curve.png``, and the thinning of long runs that pictures and pages need."""
