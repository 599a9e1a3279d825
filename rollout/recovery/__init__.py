"""What RolloutActor does when its engine dies: keep what was promised, start again, go on."""
