"""What is measured while a run trains: step times, breakdown, memory, load, energy, profiles."""
