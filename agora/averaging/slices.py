"""Which elements of a stage's weights one round averages, and in which parts. Pure: computed from the seed, never sent."""
