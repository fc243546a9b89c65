"""ResNet-50 on Open Images V4: several labels per image, most of them unknown."""

from d5suite.cases.recipe import MEASUREMENTS, Preset, Recipe, Training
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD

# For a class, the average precision of an untrained network is the fraction of positive labels
# among the verified labels. In V4's validation set, 366 of 551 thousand verified labels are
# positive.
TARGET = (
    "The target is ours: nothing is published for ResNet-50 on V4's 7,186 trainable classes from random weights. The "
    "nearest published result: 86.72% mAP of TResNet-M on V6's 9,600 classes (Ben-Baruch et al., 'Multi-label "
    "classification with partial annotations using class-aware selective loss', 2021, arXiv 2110.10955)"
)

RECIPE = Recipe(
    name="openimages_resnet50",
    network="resnet50",
    dataset="openimages",
    optimizer=SGD(learning_rate=2**-8, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    on_request=True,
    presets={
        "smoke": Preset(image_size=64, batch_size=8, classes=10, max_time_s=0.5),
        "standard": Preset(
            image_size=224,
            batch_size=32,
            classes=7186,
            optimizer=SGD(learning_rate=0.0125, momentum=0.9, weight_decay=1e-4),
            max_time_s=20.0,
            training=Training(
                target=0.7,
                metric="mean average precision",
                epochs=4,
                schedule=StepDecay(milestones=(2, 3)),
                source=TARGET,
                time_limit_s=None,
            ),
            note="one run: an epoch has nine million images",
        ),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=7186,
            optimizer=SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4),
            max_time_s=60.0,
            training=Training(
                target=0.78,
                metric="mean average precision",
                epochs=30,
                runs=3,
                schedule=StepDecay(milestones=(10, 20), warmup_epochs=1),
                source=TARGET,
                time_limit_s=None,
            ),
        ),
        "reduced": Preset(
            image_size=64,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
