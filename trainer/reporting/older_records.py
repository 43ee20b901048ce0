"""What metrics files of earlier versions do not say of themselves. Nothing is added here: a job declares its charts."""

from trainer.reporting.charts import LOSS, SKIPPED, SPEED, Chart

# Those that were drawn of every run, whatever its job, before a start record had the entry `charts`.
CHARTS_BEFORE = (
    LOSS,
    Chart("Losses of generator (nats per token) and discriminator", ("mlm_loss", "disc_loss"), logarithmic=True),
    Chart("Accuracy of generator and discriminator", ("gen_acc", "disc_acc")),
    Chart("Discriminator: precision, recall, AUC", ("disc_precision", "disc_recall", "disc_auc")),
    Chart("Validation: bits per byte", ("bits_per_byte",)),
    *SPEED,
    Chart("Auxiliary loss", ("aux_loss",), unless_zero=True),
    Chart("Expert load: largest share in a layer", ("expert_load_max",)),
    SKIPPED,
    Chart("Expert load: mean over the layers", ("expert_load/*",)),
)
