"""The cost of neutrality: d5suite takes turns with the framework's own code in one process.

pytest recipes/test_cost_of_neutrality.py --benchmark-json cost.json
"""

from d5suite.cases.recipe import Preset, Recipe
from d5suite.optimizers.settings import SGD

RECIPE = Recipe(
    name="cost_of_neutrality",
    network="resnet50",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-8, momentum=0.9, weight_decay=1e-4),
    on_request=True,
    measurements=("cost_of_neutrality", "cost_of_loading"),
    presets={
        "smoke": Preset(image_size=64, batch_size=8, classes=10, max_time_s=4.0),
        "standard": Preset(image_size=224, batch_size=16, classes=1000, max_time_s=60.0),
        "full": Preset(image_size=224, batch_size=256, classes=1000, max_time_s=60.0),
    },
)
