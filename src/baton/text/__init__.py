"""Text processing: tokenizer, chat templates, incremental detokenisation and stop strings. No I/O after loading."""

from baton.text.content_format import ContentFormatOption
from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.stop import StopChecker
from baton.text.template import read_template_option
from baton.text.tokenizer import Tokenizer

__all__ = ["ContentFormatOption", "IncrementalDetokenizer", "StopChecker", "Tokenizer", "read_template_option"]
