"""What a run is: settings, layout, engines' abilities, study, clusters. Torch-free."""
