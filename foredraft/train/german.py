"""German sentences put together from parts, for requests to translate them."""

from __future__ import annotations

import random

_WHO = (
    "Der Bürgermeister", "Die Ärztin", "Eine Sprecherin der Polizei", "Mein Bruder",
    "Die Regierung",    "Der Trainer", "Unsere Nachbarin", "Ein Forscher aus Zürich",
    "Die Firma", "Der junge Lehrer",
    "Die Köchin", "Ein Zeuge", "Der Verband", "Die Künstlerin", "Das Gericht", "Der Gemeinderat",
    "Die Universität", "Ein Experte", "Die Stadt", "Der Präsident", "Die Ministerin", "Der Verein",
)  # fmt: skip
_DID = (
    "hat gestern einen neuen Plan vorgestellt", "will die alte Brücke bald reparieren lassen",
    "sucht seit Wochen nach einer Lösung", "kaufte im Frühling ein kleines Haus am See",
    "fordert mehr Geld für die Schulen", "erwartet in diesem Jahr weniger Besucher",
    "hat das Treffen kurzfristig abgesagt", "reist nächste Woche nach Spanien",
    "lehnt den Vorschlag aus Kostengründen ab", "freut sich über den großen Erfolg",
    "arbeitet an einem Buch über das Mittelalter", "eröffnete am Montag eine Ausstellung",
    "warnte vor zu großen Hoffnungen", "konnte die Frage nicht beantworten",
    "gewann überraschend den ersten Preis", "muss bis Freitag eine Entscheidung treffen",
    "baut einen neuen Bahnhof im Norden der Stadt", "hat viele Jahre im Ausland gelebt",
    "verkauft seit 1998 Brot und Kuchen auf dem Markt", "unterstützt junge Familien mit Kindern",
)  # fmt: skip
_OPENING = (
    "Am Dienstag", "Nach Angaben der Zeitung", "Vor zwei Jahren", "In der vergangenen Nacht",
    "Trotz des schlechten Wetters", "Wegen der hohen Preise", "Im Sommer", "Zum ersten Mal",
    "Seit dem Ende des Krieges", "Bei einem Unfall auf der Autobahn", "Kurz vor Mitternacht",
)  # fmt: skip
_HAPPENED = (
    "wurden drei Menschen leicht verletzt", "kamen mehr als tausend Gäste in das Dorf",
    "stieg der Preis für Milch um zwölf Prozent", "fiel in vielen Häusern der Strom aus",
    "blieben die meisten Geschäfte geschlossen", "fuhr kein einziger Zug nach Süden",
    "konnten die Kinder im Fluss baden", "wurde das Museum wieder geöffnet",
    "verließen viele junge Leute die Region", "sank die Zahl der Arbeitslosen auf vier Prozent",
    "suchte die Feuerwehr nach dem vermissten Hund", "spielte das Orchester im Stadtpark",
)  # fmt: skip
_ENDING = (
    "", "", ", obwohl das Wetter schlecht war", ", weil das Geld nicht reicht",
    ", sagte ein Sprecher am Abend", ", wie die Zeitung am Mittwoch berichtete",
    ", damit alle sicher nach Hause kommen", ", ohne auf die Kritik einzugehen",
    ", nachdem die Gespräche gescheitert waren", " und will damit ein Zeichen setzen",
    ", aber nicht alle sind damit zufrieden", ", bevor der Winter beginnt",
    ", wenn der Rat zustimmt", ", denn es gibt kaum andere Möglichkeiten",
)  # fmt: skip
_PLAIN = (
    "Wo finde ich die nächste Apotheke?", "Das Essen war gut, aber etwas zu teuer.",
    "Können Sie mir bitte sagen, wann der letzte Bus fährt?", "Ich habe meinen Schlüssel verloren.",
    "Die Kinder spielen im Garten und der Hund schläft.", "Wir treffen uns um acht vor dem Kino.",
    "Es hat die ganze Nacht geregnet.", "Sie liest jeden Abend ein Buch.", "Das ist nicht wahr.",
    "Wie viel kostet eine Karte für zwei Personen?", "Mein Vater war früher Lokführer.",
    "Vielen Dank für Ihre schnelle Antwort.", "Bitte schließen Sie die Tür.",
)  # fmt: skip


def german_sentence(random_: random.Random) -> str:
    """A sentence such as newspapers have, or an everyday one."""
    pick = random_.choice
    form = random_.random()
    if form < 0.15:
        return pick(_PLAIN)
    if form < 0.55:
        return f"{pick(_WHO)} {pick(_DID)}{pick(_ENDING)}."
    if form < 0.9:
        return f"{pick(_OPENING)} {pick(_HAPPENED)}{pick(_ENDING)}."
    return f"{pick(_OPENING)} {pick(_HAPPENED)}. {pick(_WHO)} {pick(_DID)}{pick(_ENDING)}."
