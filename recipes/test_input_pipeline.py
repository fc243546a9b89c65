"""Loading images: d5suite's input pipeline and each framework's own loader, from every storage format.

pytest recipes/test_input_pipeline.py --benchmark-json loading.json

No network is run; ResNet-50 says what size and how many classes the images have.
"""

from d5suite.data.formats import KINDS
from d5suite.levels.training import SGD
from d5suite.recipe import LOADING, Preset, Recipe

RECIPE = Recipe(
    name="input_pipeline",
    network="resnet50",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-8),
    on_request=True,
    measurements=LOADING,
    formats=KINDS,
    presets={
        "smoke": Preset(image_size=224, batch_size=16, classes=10, max_time_s=1.0),
        "standard": Preset(image_size=224, batch_size=64, classes=10, max_time_s=10.0),
        "full": Preset(image_size=224, batch_size=256, classes=1000, max_time_s=60.0),
    },
)
