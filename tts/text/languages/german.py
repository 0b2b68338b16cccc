"""German."""

from __future__ import annotations

import re

from tts.text.languages.language import (
    FEMININE,
    MASCULINE,
    Language,
    Noun,
    currencies,
    names,
    nouns,
    ordinal_words,
    pairs,
)

_FEMININE = re.compile(
    r".*(?:ung|heit|keit|schaft|ion|tät|ik|ur|ei|enz|anz|in|e)|(?:Frau|Woche|Nacht|Stadt|Hand|Wand"
    r"|Bank|Mutter|Tochter|Schwester|Uhr|Zahl|Million|Milliarde|Tür|Welt|Zeit|Person|Liga|Auflage)"
)
_MASCULINE = re.compile(
    r"(?:Name|Junge|Kunde|Kollege|Käse|Buchstabe|Gedanke|Affe|Hase|Löwe|Ende|Auge|Gebäude|Gebirge"
    r"|Gemüse|Interesse|Getränke|Termin|Bein|Stein|Wein|Schein|Verein|Ei|Jahr|Kino|Hai|Mai)"
)
_DATIVE = re.compile(
    r"(?:^|\s)(?:am|im|zum|zur|beim|vom|dem|den|des|ins|einem|einen|einer|diesem|jeden|jedem)$"
    r"|(?:^|\s)(?:in|mit|bei|auf|an|zu|aus|seit|nach|von|vor|ab|während)\sder$",
    re.I,
)
_WEAK = re.compile(r"(?:^|\s)(?:der|die|das|diese[sr]?|jede[sr]?|eine|meine|seine|ihre)$", re.I)


def _gender_of(noun: str) -> str:
    is_feminine = _FEMININE.fullmatch(noun) and not _MASCULINE.fullmatch(noun)
    return FEMININE if is_feminine else MASCULINE


def _agree(words: str, gender: str, noun: str) -> str:
    """Return a number in front of a noun: "ein", "eine"."""
    if words != "eins" or not gender:
        return words
    return "eine" if gender == FEMININE else "ein"


def _ordinal(value: int, ending: str, before: str, behind: str) -> str:
    if ending == "er":  # "die 1990er Jahre"
        return _year(value) + "er"
    words = ordinal_words("de", value)
    if _DATIVE.search(before):
        return words + "n"
    is_weak = _WEAK.search(before) or _gender_of(behind) == FEMININE
    return words if is_weak else words + "r"


def _year(number: int) -> str:
    from num2words import num2words

    return str(num2words(number, lang="de", to="year"))


_MONTHS = names("""Januar Februar März April Mai Juni Juli August September Oktober November
        Dezember""")

GERMAN = Language(
    num2words="de",
    minus="minus",
    decimal="Komma",
    point="Punkt",
    until="bis",
    per="pro",
    months=_MONTHS,
    months_short={"jänner": 1, "feber": 2},
    digits=names("""null eins zwei drei vier fünf sechs sieben acht neun"""),
    units=nouns(
        """km=Kilometer/Kilometer | m=Meter/Meter | cm=Zentimeter/Zentimeter
        | mm=Millimeter/Millimeter | μm=Mikrometer/Mikrometer | kg=Kilogramm/Kilogramm
        | g=Gramm/Gramm | mg=Milligramm/Milligramm | t=Tonne/Tonnen/f | l=Liter/Liter
        | L=Liter/Liter | ml=Milliliter/Milliliter | cl=Zentiliter/Zentiliter
        | h=Stunde/Stunden/f | min=Minute/Minuten/f | s=Sekunde/Sekunden/f
        | ms=Millisekunde/Millisekunden/f
        | km/h=Kilometer pro Stunde/Kilometer pro Stunde
        | m/s=Meter pro Sekunde/Meter pro Sekunde | m²=Quadratmeter/Quadratmeter
        | km²=Quadratkilometer/Quadratkilometer | cm²=Quadratzentimeter/Quadratzentimeter
        | m³=Kubikmeter/Kubikmeter | cm³=Kubikzentimeter/Kubikzentimeter | ha=Hektar/Hektar
        | °=Grad/Grad | °C=Grad Celsius/Grad Celsius | °F=Grad Fahrenheit/Grad Fahrenheit
        | %=Prozent/Prozent | W=Watt/Watt | kW=Kilowatt/Kilowatt | MW=Megawatt/Megawatt
        | kWh=Kilowattstunde/Kilowattstunden/f | V=Volt/Volt | A=Ampere/Ampere | Hz=Hertz/Hertz
        | kHz=Kilohertz/Kilohertz | MHz=Megahertz/Megahertz | GHz=Gigahertz/Gigahertz
        | dB=Dezibel/Dezibel | kB=Kilobyte/Kilobyte | KB=Kilobyte/Kilobyte | MB=Megabyte/Megabyte
        | GB=Gigabyte/Gigabyte | TB=Terabyte/Terabyte | kcal=Kilokalorie/Kilokalorien/f"""
    ),
    currencies=currencies(
        """EUR=Euro/Euro + Cent/Cent | USD=Dollar/Dollar + Cent/Cent
        | GBP=Pfund/Pfund + Penny/Pence | JPY=Yen/Yen | CHF=Franken/Franken + Rappen/Rappen
        | BRL=Real/Real + Centavo/Centavos"""
    ),
    money="{major} {cents}",
    of_millions="",
    fractions=pairs(
        """1/2=ein halb | 1/3=ein Drittel | 2/3=zwei Drittel | 1/4=ein Viertel | 3/4=drei Viertel"""
    ),
    over="durch",
    scales=nouns(
        """Mio.=Million/Millionen/f | Mrd.=Milliarde/Milliarden/f | Mio=Million/Millionen/f
        | Mrd=Milliarde/Milliarden/f | Million=Million/Millionen/f | Millionen=Million/Millionen/f
        | Milliarde=Milliarde/Milliarden/f | Milliarden=Milliarde/Milliarden/f
        | Tsd.=tausend/tausend/"""
    ),
    date="{day} {month}",
    dated="{date} {year}",
    day_month=r"\.\s*",
    hours=Noun("Uhr", "Uhr"),
    clock="{hour} Uhr {minute}",
    full_hour="{hour} Uhr",
    clock_unit=r"Uhr\b",
    ordinal_ending=r"(\.)(?=\s[^\W\d_])|(te[nmrs]?|ste[nmrs]?|er)\b",
    ordinal=_ordinal,
    abbreviations=pairs(
        """Dr.=Doktor | Prof.=Professor | Hr.=Herr | z. B.=zum Beispiel | d. h.=das heißt
        | u. a.=unter anderem | u. U.=unter Umständen | i. d. R.=in der Regel
        | bzw.=beziehungsweise | ca.=circa | ggf.=gegebenenfalls | evtl.=eventuell
        | inkl.=inklusive | exkl.=exklusive | Str.=Straße | St.=Sankt | Tel.=Telefon
        | vgl.=vergleiche | v. Chr.=vor Christus | n. Chr.=nach Christus | usw.=und so weiter
        | etc.=et cetera"""
    ),
    labels=pairs(
        """Nr.=Nummer | S.=Seite | Abb.=Abbildung | Art.=Artikel | Bd.=Band | Kap.=Kapitel"""
    ),
    signs=pairs("""²=hoch zwei | ³=hoch drei | &=und | @=at | +=plus | ×=mal | ÷=geteilt durch
        | ±=plus minus | §=Paragraf""")
    | {"=": "gleich"},
    spells_decimals=True,
    agree=_agree,
    gender_of=_gender_of,
    not_counted=frozenset(
        names("""ab aber als am an auf aus bei bis das dass dem den der des die durch ein eine er
        es für geboren gewesen hat in ist kam kamen mal man mit nach nicht noch nur oder
        pro sie sind so um und vom von vor war waren wenn wie wird wurde zu zum zur""")
    ),
    year=_year,
    has_dotted_ordinals=True,
    before_ordinals=frozenset(
        names("""am im zum zur beim vom der die das dem den des ein eine einen einem einer dieser
        diese dieses jeder jede jedes jeden mein meine sein seine ihr ihre seit bis ab""")
    ),
)
