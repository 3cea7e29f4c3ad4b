"""`syncline verify`: what ranks record in every step, and how the recordings of runs compare."""
