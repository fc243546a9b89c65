"""LeNet-5 on handwritten digits, trained by several ranks to a target accuracy.

Ranks divide the 1,437 images, so an epoch has fewer steps, with larger batches. Schemes differ in
the number of epochs that they need, and in the data that they send.

pytest recipes/test_digits_lenet_ranks.py --ranks 1,2 --scheme all_reduce,gossip,top_k
"""

from d5suite.cases.recipe import Preset, Recipe, Training
from d5suite.optimizers.settings import SGD

TRAINING = Training(target=0.97, epochs=60, runs=3)

RECIPE = Recipe(
    name="digits_lenet_ranks",
    network="lenet5",
    dataset="digits",
    optimizer=SGD(learning_rate=0.03125, momentum=0.9),
    label_smoothing=0.1,
    on_request=True,
    measurements=("distributed_accuracy",),
    presets={
        name: Preset(image_size=32, batch_size=32, classes=10, max_time_s=0.3, training=TRAINING)
        for name in ("smoke", "standard", "full", "reduced")
    },
)
