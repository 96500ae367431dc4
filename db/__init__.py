"""The database of Peakmark: models, migrations, queue and repository."""
