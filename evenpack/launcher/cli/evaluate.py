"""The command `evenpack evaluate`."""

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, Save, load, reporting


def evaluate(run_file: RunFile, overrides: Overrides = None, *, save: Save = None, as_json: AsJson = False) -> None:
    """Evaluate on each source's held-out documents.

    Uses the newest checkpoint of the run, in one process, on the GPU if there is one. The data may be prepared with
    another recipe than in training, by the same tokenizer: the same documents are held out.

    \b
    Examples:
      evenpack evaluate configs/gpt2_mini_wiki.yaml training.evaluation_packs=500
      evenpack evaluate RUN.yaml data.prepared_dir=runs/other data.recipe='{kind: documents, ...}' --save other.json
    """
    config = load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        from evenpack.launcher.processes.devices import settle_accelerator

        settle_accelerator()
        import torch

        from evenpack.engine.evaluate import aggregate_loss, evaluate_model, evaluations_to_json
        from evenpack.launcher import views
        from evenpack.launcher.trained import load_trained_model

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trained = load_trained_model(config, device)
        evaluations = evaluate_model(trained.model, trained.run, trained.world)
        sources = evaluations_to_json(trained.run.prepared, evaluations)
        report.value = {"checkpoint": trained.checkpoint.path, "step": trained.checkpoint.step, "sources": sources}
        report.shown.append(views.evaluation_table(sources, title=f"After step {trained.checkpoint.step:,}"))
        aggregate = aggregate_loss(evaluations, config.training.validation_weights)
        if aggregate is not None:
            report.value["aggregate"] = aggregate
            report.shown.append(views.aggregate_line(aggregate))
