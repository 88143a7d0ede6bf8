"""Life after training: load the models of a run folder, predict, evaluate, export.

trained = fedala.load("runs/mine")
labels = trained.predict(images, client=7)
"""
