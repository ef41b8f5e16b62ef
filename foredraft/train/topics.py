"""Words that made-up requests are about; see `foredraft.train.tasks`."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(" ".join(text.split()).split(", "))


SUBJECTS = listed(
    """the water cycle, black holes, photosynthesis, volcanoes, the human heart, vaccines,
    plate tectonics, magnetism, electric cars, solar panels, wind power, nuclear fusion, the
    greenhouse effect, coral reefs, rainforests, deserts, glaciers, rivers, earthquakes, tides,
    the moon, Mars, comets, galaxies, the speed of light, gravity, sound waves, lasers,
    semiconductors, batteries, bridges, suspension cables, concrete, steel, glass, paper
    making, printing, bicycles, railways, steam engines, jet engines, sailing ships,
    lighthouses, canals, dams, cells, DNA, enzymes, bacteria, viruses, antibiotics, the immune
    system, sleep, memory, the nervous system, digestion, vitamins, bread, cheese, chocolate,
    coffee, tea, honey, rice, olive oil, spices, salt, whales, owls, wolves, elephants,
    octopuses, ants, bees, butterflies, penguins, horses, cats, dogs, migrating birds, sharks,
    frogs, oak trees, mushrooms, orchids, grasses, cotton, silk, wool, leather, pottery,
    weaving, watches, the calendar, maps, the compass, the alphabet, zero, prime numbers,
    fractions, triangles, probability, statistics, calculus, matrices, graph theory,
    algorithms, sorting, recursion, databases, encryption, compilers, operating systems, the
    internet, email, web browsers, search engines, machine learning, neural networks, robots,
    drones, computer games, chess, football, tennis, swimming, marathons, climbing, yoga,
    ballet, jazz, opera, the violin, drums, folk songs, film music, photography, oil painting,
    sculpture, cathedrals, museums, libraries, theatre, poetry, novels, fairy tales, myths,
    comics, the Roman Empire, ancient Egypt, the Silk Road, the Vikings, the Black Death, the
    Renaissance, the Reformation, the French Revolution, the Industrial Revolution, the
    American Civil War, the First World War, the Cold War, the Space Race, the United Nations,
    democracy, taxes, inflation, banks, trade, labour unions, the stock market, insurance,
    advertising, small businesses, farming, fishing, forestry, mining, recycling, public
    transport, city planning, housing, schools, universities, hospitals, nursing, psychology,
    ethics, logic, stoicism, free will, language, translation, dialects, human rights, voting,
    courts, juries, immigration, tourism, hotels, airports, cooking, gardening, knitting, chess
    clubs, camping, travel, friendship, family life, marriage, work, leadership, public
    speaking, job interviews, stress, exercise, nutrition, childhood, old age, time management,
    money saving, remote work, social media, fake news, privacy, artificial intelligence,
    climate change, biodiversity, water shortage, renewable energy, waste, noise, air
    pollution, road safety"""
)

PLACES = listed(
    """Lisbon, Kyoto, Nairobi, Lima, Oslo, Istanbul, Montreal, Cape Town, Vienna, Hanoi, Cairo,
    Mexico City, Edinburgh, Prague, Buenos Aires, Sydney, Marrakesh, Seoul, Warsaw, Athens,
    Dublin, Iceland, Peru, Kenya, Norway, Portugal, Vietnam, Canada, Brazil, Morocco, Poland,
    Chile, Greece, Finland, Nepal, Egypt, Cuba, Jordan, Thailand, New Zealand, Ethiopia,
    Hungary"""
)

NAMES = listed(
    """Anna, Ben, Clara, David, Elena, Farid, Grace, Hiro, Ines, Jonas, Karin, Leo, Maya, Noah,
    Olga, Pedro, Quinn, Rosa, Samuel, Tara, Umar, Vera, Walter, Ximena, Yusuf, Zoe, Priya, Tom,
    Linda, Marco, Amara, Peter, Ruth, Ivan, Nadia, Oscar, Kofi, Mei, Carlos, Emma"""
)
SURNAMES = listed(
    """Becker, Okafor, Lindgren, Moreau, Tanaka, Silva, Novak, Kowalski, Haddad, Murphy,
    Jensen, Rossi, Patel, Nguyen, Garcia, Keller, Brandt, Fischer, Dubois, Ahmed, Costa,
    Petrov, Weber, Lang, Hughes"""
)
JOBS = listed(
    """a baker, a museum guide, a detective, a sea captain, a tour guide, a chef, a doctor, a
    teacher, a gardener, a journalist, a lawyer, a physicist, a poet, a robot, a king, a
    knight, a pirate, a librarian, a football coach, a travel agent, a career adviser, a
    nutritionist, a job interviewer, a bank clerk, a historian, a stand-up comedian, a
    motivational speaker, a mathematician, a carpenter, an astronaut, an engineer, an
    architect, an actor, a salesman, a weather forecaster, a pilot, a nurse, a farmer, a
    software developer, a philosopher, a wizard, a dragon, a ghost, a Roman senator, a Viking,
    a time traveller, a shop assistant, a film critic, a tree, an old cat"""
)

THINGS = listed(
    """apples, books, pencils, tickets, stickers, marbles, eggs, cookies, bottles, chairs,
    flowers, shirts, oranges, cards, boxes, stamps, coins, candles, bricks, plants, sandwiches,
    balloons, notebooks, toys, lamps, cakes, bags, cups, shells, buttons"""
)
CONTAINERS = ("boxes", "bags", "crates", "baskets", "shelves", "packs", "trays", "drawers")
FORMS = listed(
    """a short story, a poem, a letter, a blog post, a speech, a product description, a diary
    entry, a news report, a dialogue, a song, a limerick, an essay, an advertisement, a press
    release, a fable, a travel guide, a recipe, an invitation, a thank-you note, a film review,
    a book review, a fairy tale, a tweet, a slogan, a cover letter, an apology, a eulogy, a
    haiku, a scene of a play, an opening paragraph of a novel, a newsletter, a list of tips"""
)
TONES = listed(
    """funny, serious, formal, friendly, persuasive, gloomy, hopeful, romantic, ironic, simple,
    vivid, dramatic, calm, polite, enthusiastic"""
)
AUDIENCES = (
    "children", "beginners", "my boss", "a friend", "students", "experts", "tourists", "parents",
    "a school magazine", "new employees", "a ten-year-old", "customers", "neighbours",
)  # fmt: skip
LANGUAGES = ("French", "Spanish", "Italian", "German", "Dutch", "Portuguese", "Latin", "Polish")
