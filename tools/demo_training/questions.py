"""Typical user questions from templates: openings of conversations for training, and others for measuring."""

import itertools
import random

TOPICS = """gravity; the water cycle; black holes; electricity; evolution; inflation; democracy; the immune system;
volcanoes; earthquakes; vaccines; DNA; the internet; databases; operating systems; compilers; neural networks;
renewable energy; solar power; nuclear energy; the solar system; plate tectonics; recycling; deforestation; the human
heart; digestion; sleep; stress; meditation; yoga; running; swimming; football; chess; painting; jazz; opera; the piano;
the guitar; photography; cinema; the Roman Empire; ancient Egypt; the French Revolution; World War II; the Cold War;
the Renaissance; the Industrial Revolution; slavery; human rights; taxes; the stock market; banking; budgeting; saving
money; marketing; leadership; teamwork; time management; public speaking; job interviews; negotiation; bread; cheese;
chocolate; coffee; tea; rice; pasta; soup; salad; bees; whales; dogs; cats; horses; birds; elephants; trees; rivers;
mountains; deserts; forests; the moon; the sun; stars; rain; snow; wind; bridges; trains; airplanes; bicycles; cars;
robots; encryption; algebra; geometry; probability; statistics; prime numbers; fractions; grammar; poetry; mythology;
religion; philosophy; ethics; psychology; memory; dreams; happiness; friendship; love; courage; honesty""".replace(
    "\n", " "
).split("; ")
ABOUT = """Explain {} in simple terms.|What is {}?|Tell me about {}.|Why is {} important?|Write a short story about {}.|
Write a poem about {}.|Give me five facts about {}.|What should a beginner know about {}?|How does {} work?|
Summarize the history of {}.|What are common misconceptions about {}?|Write a paragraph about {}.|
List the pros and cons of {}.|How can I learn more about {}?|Explain {} to a child.|What are some examples of {}?|
Can you help me understand {}?|Write a short essay on {}.|What do experts say about {}?|Give me a quiz about {}.|
Describe {} in one sentence.|How has {} changed over time?|I want to write a blog post about {}. Where do I start?|
Write a tweet about {}.|What books about {} do you recommend?|Compare {} with something similar.""".replace(
    "\n", ""
).split("|")
PLACES = """Germany; Italy; Spain; Japan; China; India; Brazil; Canada; Mexico; Egypt; Kenya; Australia; Norway; Sweden;
Poland; Greece; Turkey; Russia; Argentina; Peru; Portugal; Ireland; Austria; Thailand; Vietnam""".replace("\n", " ")
OF_PLACE = """What is the capital of {}?|What language is spoken in {}?|What food is {} known for?|
Plan a three-day trip to {}.|What is the weather like in {}?|Tell me about the culture of {}.""".replace("\n", "")
TASKS = """adds two numbers; finds the largest number in a list; counts vowels in a word; checks if a number is prime;
sorts a list; removes duplicates from a list; reads a file; computes a factorial; prints the Fibonacci sequence;
converts Celsius to Fahrenheit; merges two dictionaries; finds the average of a list; checks for a palindrome;
counts words in a text; downloads a web page; flattens a nested list; generates a password; parses a date""".replace(
    "\n", " "
)
OF_TASK = "Write a Python function that {}.|Write a JavaScript function that {}.|How do I write code that {}?"

# Only for measuring: no question above is about these topics.
HELD_OUT = (
    "What is the capital of France?",
    "Explain how photosynthesis works in simple terms.",
    "Write a short poem about the sea.",
    "How do I make pancakes?",
    "What are the main causes of climate change?",
    "Write a Python function that reverses a string.",
    "Summarize the plot of Romeo and Juliet.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips for learning a new language.",
    "Who was Albert Einstein?",
    "Write an email to my boss asking for a day off.",
    "What is machine learning?",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Suggest a healthy breakfast.",
    "What is the meaning of the word 'serendipity'?",
)


def questions(seed: int) -> list[str]:
    """All combinations of templates and topics, in an order that `seed` decides."""
    made = [template.format(topic) for template, topic in itertools.product(ABOUT, TOPICS)]
    made += [template.format(place) for template, place in itertools.product(OF_PLACE.split("|"), PLACES.split("; "))]
    made += [template.format(task) for template, task in itertools.product(OF_TASK.split("|"), TASKS.split("; "))]
    random.Random(seed).shuffle(made)
    return made
