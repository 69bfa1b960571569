"""The closed world of the demo text: people, things, places, animals and the facts about them.

Every table is constant and small, so that a model of a few million parameters can learn all of it.
"""

from types import MappingProxyType

GIRLS = ("Mia", "Anna", "Lily", "Sara", "Emma", "Nora", "Zoe", "Ruby", "Ella", "Clara", "Ivy", "Rosa")
BOYS = ("Tom", "Ben", "Leo", "Max", "Sam", "Oscar", "Finn", "Jack", "Noah", "Paul", "Hugo", "Otto")
PEOPLE = GIRLS + BOYS

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "white", "black", "brown", "pink", "grey", "silver")
TRAITS = ("kind", "brave", "curious", "clever", "quiet", "cheerful", "gentle", "honest", "patient", "funny")
TOYS = (
    "ball", "kite", "hat", "scarf", "book", "drum", "boat", "lamp", "key", "box", "bell", "cup",
    "coat", "bag", "ring", "doll", "train", "flute", "map", "umbrella",
)  # fmt: skip
FOODS = ("apple", "cake", "cookie", "sandwich", "pear", "orange", "carrot", "pie", "banana", "plum")
COUNTED = ("apples", "books", "coins", "stones", "pencils", "balls", "shells", "flowers", "eggs", "stamps")
PLACES = (
    "forest",
    "park",
    "garden",
    "village",
    "market",
    "river",
    "beach",
    "farm",
    "school",
    "castle",
    "meadow",
    "hill",
)
HOMES = ("village", "town", "valley", "city")
HIDING = (
    "under the bed", "behind the door", "in the garden", "under the old tree", "next to the well",
    "on top of the shelf", "behind the barn", "under the bridge", "in the tall grass", "beside the river",
)  # fmt: skip
SKILLS = ("swim", "sing", "read", "paint", "dance", "cook", "ride a bike", "play the piano", "skate", "climb")
SEEDS = MappingProxyType(
    {"sunflower": "yellow", "rose": "red", "apple tree": "green", "pumpkin": "orange", "tulip": "pink"}
)
WEATHER = ("sunny", "rainy", "windy", "snowy", "cloudy")
MORALS = (
    "It is good to help others.",
    "A true friend is a treasure.",
    "Never give up.",
    "Sharing makes everyone happy.",
    "Small things can bring great joy.",
    "It is always good to be kind.",
)

# animal: (sound, legs, what it eats, its young, where it lives)
ANIMALS = MappingProxyType(
    {
        "cat": ("meow", 4, "fish", "kitten", "a house"),
        "dog": ("woof", 4, "meat", "puppy", "a house"),
        "cow": ("moo", 4, "grass", "calf", "a farm"),
        "duck": ("quack", 2, "seeds", "duckling", "a pond"),
        "sheep": ("baa", 4, "grass", "lamb", "a farm"),
        "horse": ("neigh", 4, "hay", "foal", "a stable"),
        "pig": ("oink", 4, "corn", "piglet", "a farm"),
        "lion": ("roar", 4, "meat", "cub", "the savanna"),
        "frog": ("ribbit", 4, "flies", "tadpole", "a pond"),
        "bee": ("buzz", 6, "nectar", "larva", "a hive"),
        "owl": ("hoot", 2, "mice", "owlet", "the forest"),
        "mouse": ("squeak", 4, "cheese", "pup", "a hole"),
        "rooster": ("cock-a-doodle-doo", 2, "corn", "chick", "a farm"),
        "wolf": ("howl", 4, "meat", "pup", "the forest"),
        "goat": ("bleat", 4, "leaves", "kid", "a farm"),
        "bear": ("growl", 4, "honey", "cub", "a cave"),
    }
)
STORY_ANIMALS = ("cat", "dog", "duck", "rabbit", "fox", "owl", "mouse", "bear", "frog", "squirrel", "bird", "goat")

CAPITALS = MappingProxyType(
    {
        "France": "Paris",
        "Germany": "Berlin",
        "Italy": "Rome",
        "Spain": "Madrid",
        "England": "London",
        "Japan": "Tokyo",
        "China": "Beijing",
        "Russia": "Moscow",
        "Egypt": "Cairo",
        "Canada": "Ottawa",
        "Greece": "Athens",
        "Norway": "Oslo",
        "Sweden": "Stockholm",
        "Poland": "Warsaw",
        "Austria": "Vienna",
        "Portugal": "Lisbon",
        "Ireland": "Dublin",
        "India": "New Delhi",
        "Kenya": "Nairobi",
        "Peru": "Lima",
        "Cuba": "Havana",
        "Finland": "Helsinki",
        "Hungary": "Budapest",
        "South Korea": "Seoul",
    }
)
CITIES = ("Paris", "Berlin", "Rome", "Madrid", "London", "Tokyo", "Cairo", "Oslo", "Vienna", "Lisbon", "Dublin", "Lima")

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("fast", "slow"), ("happy", "sad"),
    ("old", "young"), ("light", "dark"), ("open", "closed"), ("full", "empty"), ("hard", "soft"), ("wet", "dry"),
    ("left", "right"), ("early", "late"), ("loud", "quiet"), ("rich", "poor"), ("long", "short"), ("high", "low"),
    ("strong", "weak"), ("yes", "no"), ("good", "bad"), ("black", "white"), ("in", "out"), ("near", "far"),
)  # fmt: skip
THING_COLOURS = MappingProxyType(
    {
        "the sky": "blue",
        "grass": "green",
        "snow": "white",
        "the sun": "yellow",
        "blood": "red",
        "coal": "black",
        "a banana": "yellow",
        "a carrot": "orange",
        "a tomato": "red",
        "milk": "white",
        "chocolate": "brown",
        "a lemon": "yellow",
        "a frog": "green",
        "an elephant": "grey",
    }
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")
SHAPES = MappingProxyType({"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8})
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
PLURALS = MappingProxyType(
    {
        "cat": "cats", "dog": "dogs", "mouse": "mice", "child": "children", "foot": "feet", "box": "boxes",
        "baby": "babies", "leaf": "leaves", "man": "men", "goose": "geese", "tooth": "teeth", "bus": "buses",
    }
)  # fmt: skip
SPELLED = (
    "cat",
    "dog",
    "tree",
    "house",
    "apple",
    "moon",
    "fish",
    "bird",
    "book",
    "star",
    "milk",
    "water",
    "hello",
    "green",
)
