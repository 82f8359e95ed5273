"""`evenpack study imbalance`."""

from evenpack.launcher.cli.arguments import AsJson, LengthsInput, Overrides, Plot, Save, reporting
from evenpack.launcher.cli.subject_options import SubjectOptions, takes, takes_subject
from evenpack.launcher.imbalance_options import ImbalanceOptions


@takes_subject
@takes("study", ImbalanceOptions)
def study_imbalance(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    study: ImbalanceOptions,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Compare packs with un-padding and padding on one device to thousands, where each step waits for the slowest.

    Clusters are simulated on the lengths; beside them stand the published curve and, if given, a log.

    \b
    Examples:
      evenpack study imbalance wikipedia_512 --devices 1..2048 --plot imbalance.png --save imbalance.json
      evenpack study imbalance wikipedia_1024 --cost-model gpt2_xl_estimate --devices 8,64,512
      evenpack study imbalance RUN.yaml --cost-model h100.json --all-reduce-bytes 6.7e8 --bandwidth 100
      evenpack study imbalance wikipedia_512 --log result_0.txt --padded-baseline 1130
    """
    with reporting(as_json, save=save) as report:
        from evenpack.launcher.imbalance_view import ImbalanceRequest
        from evenpack.launcher.imbalance_view import study_imbalance as compare
        from evenpack.launcher.inspection import find_subject

        request = ImbalanceRequest(study, plot=plot)  # before anything is read
        report.value, report.shown = compare(find_subject(lengths, overrides or [], options), request)
