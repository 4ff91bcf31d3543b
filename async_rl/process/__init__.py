"""What every process of a run needs: starting children, ending with the parent, importing the user's own code.

Enters the name of a module to start, of a fault point, or of code that a config names; leaves a running child, a
process that ends with its parent, or imported code whose source has the expected digest. Every folder above calls it.
"""
