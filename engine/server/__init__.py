"""The API process: OpenAI routes in front of the scheduler. It never imports torch.

A request's way through the rooms: ``app`` routes it, ``access`` gives it an id and a log line, ``auth`` checks its key,
``protocol`` reads its body, ``constraints`` turns what it asks of the form of the answer into a grammar, ``admission``
holds it against the limits, ``flight`` sends it over the ``wire`` and waits, ``choice`` makes text of the tokens,
``chat`` or ``completions`` makes OpenAI's objects of the text, and ``streaming`` sends them.
"""
