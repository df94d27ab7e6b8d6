"""Small talk: greetings, identity, abilities, thanks. The answer depends on the intent alone."""

import random

from tools.demo.sample import Sample, ask, draw

INTENTS = {
    "Hello! How can I help you?": (
        "Hello", "Hi", "Hey", "Hello!", "Hi!", "Hi there", "Hello there!", "Good morning", "Good evening!",
        "Hey there!", "hello", "hi", "Good day", "Greetings!", "Hello, how is it going?", "Say hello.", "Say hi!",
        "Hey!", "hi there", "Good afternoon", "Howdy",
    ),
    "I am the Slipway demo model, a very small language model.": (
        "Who are you?", "What are you?", "What is your name?", "Which model are you?", "Are you a person?",
        "Tell me about yourself.", "who are you", "What model is this?", "Introduce yourself.", "Are you ChatGPT?",
        "What's your name?", "Which model is this?", "Who am I talking to?", "Are you human?", "Are you a robot?",
        "what is your name", "Who made you?", "Please introduce yourself.",
    ),
    "I can add and subtract, repeat and reverse words, explain manifest keys, write JSON and call tools.": (
        "What can you do?", "How can you help me?", "What are you good at?", "Help", "Help me",
        "What do you know?", "what can you do", "Can you help me?", "What should I ask you?",
        "What are your skills?", "help", "What can I ask you?", "How do I use you?", "Show me what you can do.",
    ),
    "You are welcome!": (
        "Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Thank you very much.", "thanks", "Great, thanks!",
        "Many thanks", "Nice, thank you.", "Cool, thanks", "thank you", "Thanks!",
    ),
    "Goodbye!": (
        "Bye", "Goodbye", "See you", "Bye bye!", "Good night", "See you later!", "bye", "Goodbye!", "Farewell",
        "See you tomorrow.",
    ),
    "I am fine, thank you. How can I help you?": (
        "How are you?", "How are you doing?", "How do you do?", "Are you well?", "how are you", "How is it going?",
        "How are you today?", "Are you okay?",
    ),
    "Slipway serves language models from one manifest.": (
        "What is Slipway?", "Tell me about Slipway.", "What does Slipway do?", "what is slipway",
        "Explain Slipway.", "What is Slipway for?", "What's Slipway?",
    ),
    "I am too small to know that.": (
        "What is the capital of France?", "Who wrote Hamlet?", "Tell me a joke.", "Write a poem.",
        "What is the meaning of life?", "Tell me a story.", "How far is the moon?", "Who is the president?",
        "Write an essay about the sea.", "What is quantum physics?", "Why is the sky blue?",
        "How do I bake bread?", "Translate hello to French.", "What is love?", "How old is the earth?",
        "Explain gravity.", "Write a haiku.", "What is the capital of Norway?", "Who painted the Mona Lisa?",
        "Count the stars.", "Tell me something interesting.", "Write a short story about a dog.",
        "What is the largest ocean?", "How tall is Mount Everest?", "Once upon a time", "Tell me about dogs.",
        "Write a long text.", "What happened in 1969?", "Who invented the telephone?",
        "Give me a recipe for soup.",
    ),
}  # fmt: skip


def talk(rng: random.Random, held_out: bool) -> Sample:
    """One remark of small talk."""

    def make() -> Sample:
        reply = rng.choice(list(INTENTS))
        text = rng.choice(INTENTS[reply])
        if rng.random() < 0.3:
            text = text.lower() if rng.random() < 0.5 else text.rstrip(".!?") + rng.choice(("", "!", ".", "?"))
        return Sample("talk", f"talk {text}", ask(text), reply, "This is small talk.")

    return draw(make, held_out)
