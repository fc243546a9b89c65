"""LeNet-5 on handwritten digits, trained to a target accuracy in seconds.

The data are real and come with scikit-learn.

pytest recipes/test_digits_lenet.py --benchmark-json digits.json
"""

from d5suite.cases.recipe import Preset, Recipe, Training
from d5suite.optimizers.schedules import Cosine
from d5suite.optimizers.settings import SGD

TRAINING = Training(target=0.97, epochs=30, runs=3)

RECIPE = Recipe(
    name="digits_lenet",
    network="lenet5",
    dataset="digits",
    optimizer=SGD(learning_rate=0.0625, momentum=0.9),
    label_smoothing=0.1,
    on_request=True,
    measurements=("inference", "gradient", "training_step", "step_breakdown", "time_to_accuracy"),
    presets={
        "smoke": Preset(image_size=32, batch_size=32, classes=10, max_time_s=0.3, training=TRAINING),
        "standard": Preset(
            image_size=32,
            batch_size=32,
            classes=10,
            max_time_s=5.0,
            training=Training(target=0.97, epochs=30, runs=6),
            note="six runs: the median of fewer runs has no 95% interval",
        ),
        "full": Preset(
            image_size=32,
            batch_size=16,
            classes=10,
            optimizer=SGD(learning_rate=2**-5, momentum=0.9, weight_decay=2**-10),
            max_time_s=20.0,
            training=Training(
                target=0.98,
                epochs=60,
                runs=6,
                schedule=Cosine(epochs=60),
                source="E. Alpaydin and C. Kaynak, optdigits.names of the UCI set (1998): 98.00%, the best result "
                "listed, by the nearest neighbour among 3,823 training images of 30 other people on the 1,797 images "
                "that scikit-learn bundles. The split differs: here 1,437 of these are trained on and 360 tested, of "
                "the same people, and 98% are 353",
            ),
        ),
        "reduced": Preset(image_size=32, batch_size=32, classes=10, max_time_s=0.3, training=TRAINING),
    },
)
