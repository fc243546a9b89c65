"""Loading images from every storage format: d5suite's pipeline and the frameworks' own loaders.

pytest recipes/test_input_pipeline.py --benchmark-json loading.json

No network runs; ResNet-50 only determines the image size and the number of classes.
"""

from d5suite.cases.recipe import Preset, Recipe
from d5suite.data.formats import KINDS
from d5suite.optimizers.settings import SGD

RECIPE = Recipe(
    name="input_pipeline",
    network="resnet50",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-8),
    on_request=True,
    measurements=("input_pipeline", "native_input_pipeline", "cost_of_loading"),
    formats=KINDS,
    presets={
        "smoke": Preset(image_size=224, batch_size=16, classes=10, max_time_s=1.0),
        "standard": Preset(image_size=224, batch_size=64, classes=10, max_time_s=10.0),
        "full": Preset(image_size=224, batch_size=256, classes=1000, max_time_s=60.0),
    },
)
