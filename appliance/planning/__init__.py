"""What will run, known before anything starts: manifest × checkpoint × machine, and how it is told."""
