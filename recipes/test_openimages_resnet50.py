"""ResNet-50 on Open Images V4: several labels per image, most of them unknown."""

from d5suite.levels.training import SGD
from d5suite.recipe import MEASUREMENTS, Preset, Recipe

RECIPE = Recipe(
    name="openimages_resnet50",
    network="resnet50",
    dataset="openimages",
    optimizer=SGD(learning_rate=2**-8, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown"),
    on_request=True,
    presets={
        "smoke": Preset(image_size=64, batch_size=8, classes=10, max_time_s=0.5),
        "standard": Preset(image_size=224, batch_size=32, classes=7186, max_time_s=20.0),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=7186,
            optimizer=SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4),
            max_time_s=60.0,
            note="no accuracy of this network on this set is known to us that is published: nothing is to be reached",
        ),
        "reduced": Preset(
            image_size=64,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends that are to be read rather than to be fast",
        ),
    },
)
