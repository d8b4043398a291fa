"""What keeps a run alive and explains its end. `drzero.stages` passes in all knowledge of the recipe.
It imports no other package of this project.
"""
