"""Images in the results of tools, of which the model is told in text only."""

import logging

from server.protocol.chat import ChatRequest
from server.protocol.messages import OMITTED_IMAGE, ToolMessage

logger = logging.getLogger("twostep.server")


def log_omitted_images(request: ChatRequest, request_id: str) -> None:
    """Logs how many images of tools the model does not see, if there are any. The other APIs' requests have them here
    as the text that stands for them."""
    results = [message.content for message in request.messages if isinstance(message, ToolMessage)]
    texts = [part.text for parts in results if isinstance(parts, list) for part in parts if part.type == "text"]
    if count := texts.count(OMITTED_IMAGE):
        logger.info("request %s: the model reads text only: it is told of %d images of tools", request_id, count)
