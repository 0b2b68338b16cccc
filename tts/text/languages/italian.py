"""Italian."""

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
    r".*(?:a|[zs]ione|tà|tù|trice|udine)|(?:notte|mano|parte|voce|classe|chiave|nave|legge|luce"
    r"|madre|moglie|gente|pelle|rete|sede|serie|specie|stazione|foto|auto|moto|radio|frase)"
)
_MASCULINE = re.compile(r"(?:problem|sistem|programm|tem|clim|dramm|pianet|cinem|panoram|diplom)a")
_BEFORE_UNO = re.compile(r"(?:s[^aeiou]|z|gn|ps|pn|x|y)", re.I)


def _gender_of(noun: str) -> str:
    is_feminine = _FEMININE.fullmatch(noun) and not _MASCULINE.fullmatch(noun)
    return FEMININE if is_feminine else MASCULINE


def _agree(words: str, gender: str, noun: str) -> str:
    """Return a number in front of a noun: "un", "uno", "una", "un'"."""
    if words != "uno" or not gender:
        return words
    if gender == FEMININE:
        return "un'" if noun[:1].lower() in tuple("aeiouàèéìòù") else "una"
    return "uno" if _BEFORE_UNO.match(noun) else "un"


def _ordinal(value: int, ending: str, before: str, behind: str) -> str:
    words = ordinal_words("it", value)
    return words[:-1] + "a" if ending == "ª" else words


ITALIAN = Language(
    num2words="it",
    minus="meno",
    decimal="virgola",
    point="punto",
    until="a",
    per="per",
    months=names("""gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre
        novembre dicembre"""),
    digits=names("""zero uno due tre quattro cinque sei sette otto nove"""),
    units=nouns(
        """km=chilometro/chilometri | m=metro/metri | cm=centimetro/centimetri
        | mm=millimetro/millimetri | μm=micrometro/micrometri | kg=chilogrammo/chilogrammi
        | g=grammo/grammi | mg=milligrammo/milligrammi | t=tonnellata/tonnellate/f
        | l=litro/litri | L=litro/litri | ml=millilitro/millilitri | cl=centilitro/centilitri
        | h=ora/ore/f | min=minuto/minuti | s=secondo/secondi | ms=millisecondo/millisecondi
        | km/h=chilometro orario/chilometri orari | m/s=metro al secondo/metri al secondo
        | m²=metro quadrato/metri quadrati | mq=metro quadrato/metri quadrati
        | km²=chilometro quadrato/chilometri quadrati
        | cm²=centimetro quadrato/centimetri quadrati | m³=metro cubo/metri cubi
        | cm³=centimetro cubo/centimetri cubi | ha=ettaro/ettari | °=grado/gradi
        | °C=grado Celsius/gradi Celsius | °F=grado Fahrenheit/gradi Fahrenheit
        | %=per cento/per cento/ | W=watt/watt | kW=chilowatt/chilowatt | MW=megawatt/megawatt
        | kWh=chilowattora/chilowattora | V=volt/volt | Hz=hertz/hertz | kHz=chilohertz/chilohertz
        | MHz=megahertz/megahertz | GHz=gigahertz/gigahertz | dB=decibel/decibel
        | kB=kilobyte/kilobyte | KB=kilobyte/kilobyte | MB=megabyte/megabyte
        | GB=gigabyte/gigabyte | TB=terabyte/terabyte | kcal=chilocaloria/chilocalorie/f"""
    ),
    currencies=currencies(
        """EUR=euro/euro + centesimo/centesimi | USD=dollaro/dollari + centesimo/centesimi
        | GBP=sterlina/sterline/f + penny/pence | JPY=yen/yen
        | CHF=franco svizzero/franchi svizzeri + centesimo/centesimi
        | BRL=real/real + centavo/centavos"""
    ),
    money="{major} e {cents} {cent}",
    of_millions=" di ",
    fractions=pairs(
        """1/2=un mezzo | 1/3=un terzo | 2/3=due terzi | 1/4=un quarto | 3/4=tre quarti"""
    ),
    over="su",
    scales=nouns(
        """milione=milione/milioni | milioni=milione/milioni | mln=milione/milioni
        | miliardo=miliardo/miliardi | miliardi=miliardo/miliardi | mld=miliardo/miliardi
        | mila=mila/mila/"""
    ),
    date="{day} {month}",
    dated="{date} {year}",
    day_month=r"\s+",
    hours=Noun("ora", "ore", FEMININE),
    clock="{hour} e {minute}",
    full_hour="{hour}",
    dotted_clock=r"(?<=\b[Aa]lle )|(?<=\b[Dd]alle )|(?<=\bore )",
    first_day="primo",
    ordinal_ending=r"([ºª])|°(?=\s(?!(?:a|ad|al|all|alla|con|da|di|e|in|ma|o|per|sopra|sotto)\b)[a-z])",
    ordinal=_ordinal,
    abbreviations=pairs(
        """sig.=signor | Sig.=signor | sig.ra=signora | Sig.ra=signora | sig.na=signorina
        | dott.=dottor | Dott.=dottor | dott.ssa=dottoressa | Dott.ssa=dottoressa | dr.=dottor
        | Dr.=dottor | prof.=professor | Prof.=professor | prof.ssa=professoressa
        | Prof.ssa=professoressa | avv.=avvocato | ing.=ingegner | p. es.=per esempio
        | es.=esempio | n°=numero | nº=numero
        | tel.=telefono | Tel.=telefono | a. C.=avanti Cristo | d. C.=dopo Cristo | ca.=circa
        | ecc.=eccetera"""
    ),
    labels=pairs("""pag.=pagina | pagg.=pagine | art.=articolo | cap.=capitolo | fig.=figura
        | n.=numero | vol.=volume"""),
    signs=pairs("""²=al quadrato | ³=al cubo | &=e | @=chiocciola | +=più | ×=per | ÷=diviso
        | ±=più o meno | §=paragrafo""")
    | {"=": "uguale a"},
    agree=_agree,
    gender_of=_gender_of,
    not_counted=frozenset(
        names("""a ad al alla anche che come con da dal dalla dei del della delle di e è ed era
        fino ha hanno i il in la le lo ma nel nella no non o per più se si sono su sua
        suo tra un una vive""")
    ),
    century=r"\b(?P<roman>[IVXL]+)(?=\ssecolo)",
    century_is_ordinal=True,
)
