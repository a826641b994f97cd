"""Plain English that no reward ever touches: the guard of data sets that have none of their own.

A policy that learns a task at the price of its language gets a higher perplexity here.
"""

PLAIN_TEXTS = (
    "The ferry leaves the harbour shortly after seven, when the fog has lifted from the "
    "water. Most passengers stay inside, where it is warm and smells of coffee. A few stand "
    "at the rail and watch the lighthouse grow smaller until the island hides it.",
    "When the old baker retired, nobody in the village wanted to take over his shop. For a "
    "year the windows stayed dark. Then a young couple from the city bought the house, "
    "cleaned the oven, and learned from him how to make the dark bread that people had "
    "missed.",
    "Trees talk to each other slowly. Where their roots meet, thin threads of fungus carry "
    "water and sugar from one to another, and a tree that is attacked by insects can send a "
    "signal that makes its neighbours bitter. A forest is less a crowd than a family.",
    "Our teacher asked us to describe a stone without using the word grey. At first it seemed "
    "impossible. After a while we noticed the tiny grains, the cold weight in the hand, the "
    "line where it had once been broken, and nobody missed the colour any more.",
    "A library is quiet for a reason that has little to do with rules. People lower their "
    "voices because they do not want to be pulled out of the place to which a book has taken "
    "them, and they know that the same is true of everybody else in the room.",
    "The river had been straightened to make room for fields. It ran fast and flooded the "
    "town every spring. Last year the engineers gave it back its bends, and with them came "
    "slower water, reeds, herons, and a meadow that may stand under water without harm.",
    "To repair a clock one needs patience more than strength. Every wheel leans on the next, "
    "and what looks like the broken part is often only the place where a distant fault "
    "becomes visible. A good clockmaker listens for a long time before taking up a tool.",
    "My grandmother wrote letters in which almost nothing happened. She told us which flowers "
    "were open, who had passed by the gate, and what she had cooked. Only much later did I "
    "understand that she was showing us how to look at an ordinary day.",
    "Snow makes a city honest. It covers the advertisements and the parked cars, muffles the "
    "traffic, and records the steps of everyone who goes out early. By noon the streets are "
    "wet and noisy again, but for one morning people greet strangers.",
    "The orchestra tuned while the audience was still looking for seats. From that first "
    "careless sound nobody could have guessed what would follow. Then the lights went down, "
    "the conductor raised her arms, and sixty people breathed in at the same moment.",
)
