"""moesim: will this Mixture-of-Experts model fit this machine, how fast will it run, and what should change?"""

__version__ = "0.1.0"
