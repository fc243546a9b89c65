"""LeNet-5 on handwritten digits, trained to accuracy: real data that comes with scikit-learn, in seconds."""

from d5suite.levels.training import SGD
from d5suite.recipe import Preset, Recipe, Training

TRAINING = Training(target=0.97, epochs=30, runs=3)

RECIPE = Recipe(
    name="digits_lenet",
    network="lenet5",
    dataset="digits",
    optimizer=SGD(learning_rate=0.0625, momentum=0.9),
    on_request=True,
    measurements=("inference", "gradient", "training_step", "step_breakdown", "time_to_accuracy"),
    presets={
        "smoke": Preset(image_size=32, batch_size=32, classes=10, max_time_s=0.3, training=TRAINING),
        "reduced": Preset(image_size=32, batch_size=32, classes=10, max_time_s=0.3, training=TRAINING),
    },
)
