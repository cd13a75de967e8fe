"""An example reward: checks the answer to a sum. Replace it with your own; the task file names the function."""


def exact(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """Return 1 for each response that is its row's `answer`, else 0.

    Arguments come by name: `prompts`, `responses`, `ended` (not cut at response_length), and any column of the rows.
    """
    return [float(response.strip() == right) for response, right in zip(responses, answer, strict=True)]
