"""Spanish."""

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

_TEENS = names("""undécimo duodécimo decimotercero decimocuarto decimoquinto decimosexto
        decimoséptimo decimoctavo decimonoveno""")
_FEMININE = re.compile(
    r".*(?:as?|[cst]ión|[cst]iones|dad|dades|tud|tudes|umbres?)"
    r"|ve(?:z|ces)|mujer(?:es)?|noches?|tardes?|clases?|calles?|flor(?:es)?|llaves?|partes?"
    r"|manos?|fotos?|leyes?|pieles?|series?|bases?|fases?|frases?|naves?|nubes?|redes?|sedes?"
)
_MASCULINE = re.compile(
    r"(?:dí|map|planet|problem|sistem|program|tem|poem|esquem|lem|dilem|teorem|idiom|clim|dram"
    r"|diplom|panoram|diagram|telegram|síntom|arom|dogm|enigm|fantasm|plasm|sof|atlet|turist"
    r"|artist|gorila|cometa|tranví|guardi|policí)as?"
)


def _gender_of(noun: str) -> str:
    is_feminine = _FEMININE.fullmatch(noun) and not _MASCULINE.fullmatch(noun)
    return FEMININE if is_feminine else MASCULINE


def _agree(words: str, gender: str, noun: str) -> str:
    """Return a number in front of a noun: "veintiún", "una", "doscientas"."""
    if gender == FEMININE:
        millions = re.match(r".*mill(?:ón|ones) ?", words)
        head = millions.group() if millions else ""
        tail = re.sub(r"uno$", "una", words[len(head) :])
        return head + re.sub(r"(cient|quinient)os", r"\1as", tail)
    if gender == MASCULINE:
        return re.sub(r"\buno$", "un", re.sub(r"veintiuno$", "veintiún", words))
    return words


def _ordinal(value: int, ending: str, before: str, behind: str) -> str:
    words = _TEENS[value - 11] if 11 <= value <= 19 else ordinal_words("es", value)
    if ending in ("ª", "a", "ra", "da", "ta", "ma", "va", "na"):
        return re.sub(r"o\b", "a", words)
    is_short = ending == "er" or (behind and words.endswith(("primero", "tercero")))
    is_noun = behind and behind not in SPANISH.not_counted
    return re.sub(r"(prime|terce)ro$", r"\1r", words) if is_short and is_noun else words


SPANISH = Language(
    num2words="es",
    minus="menos",
    decimal="coma",
    point="punto",
    until="a",
    per="por",
    months=names("""enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre
        diciembre"""),
    months_short={"setiembre": 9},
    digits=names("""cero uno dos tres cuatro cinco seis siete ocho nueve"""),
    units=nouns(
        """km=kilómetro/kilómetros | m=metro/metros | cm=centímetro/centímetros
        | mm=milímetro/milímetros | μm=micrómetro/micrómetros | kg=kilogramo/kilogramos
        | g=gramo/gramos | mg=miligramo/miligramos | t=tonelada/toneladas/f | l=litro/litros
        | L=litro/litros | ml=mililitro/mililitros | cl=centilitro/centilitros
        | h=hora/horas/f | min=minuto/minutos | s=segundo/segundos | ms=milisegundo/milisegundos
        | km/h=kilómetro por hora/kilómetros por hora | m/s=metro por segundo/metros por segundo
        | m²=metro cuadrado/metros cuadrados | km²=kilómetro cuadrado/kilómetros cuadrados
        | cm²=centímetro cuadrado/centímetros cuadrados | m³=metro cúbico/metros cúbicos
        | cm³=centímetro cúbico/centímetros cúbicos | ha=hectárea/hectáreas/f
        | °=grado/grados | °C=grado Celsius/grados Celsius
        | °F=grado Fahrenheit/grados Fahrenheit | %=por ciento/por ciento/ | W=vatio/vatios
        | kW=kilovatio/kilovatios | MW=megavatio/megavatios | kWh=kilovatio hora/kilovatios hora
        | V=voltio/voltios | A=amperio/amperios | Hz=hercio/hercios | kHz=kilohercio/kilohercios
        | MHz=megahercio/megahercios | GHz=gigahercio/gigahercios | dB=decibelio/decibelios
        | kB=kilobyte/kilobytes | KB=kilobyte/kilobytes | MB=megabyte/megabytes
        | GB=gigabyte/gigabytes | TB=terabyte/terabytes | kcal=kilocaloría/kilocalorías/f"""
    ),
    currencies=currencies(
        """EUR=euro/euros + céntimo/céntimos | USD=dólar/dólares + centavo/centavos
        | GBP=libra/libras/f + penique/peniques | JPY=yen/yenes | CHF=franco suizo/francos suizos
        | BRL=real/reales + centavo/centavos | MXN=peso/pesos + centavo/centavos"""
    ),
    money="{major} con {cents} {cent}",
    of_millions=" de ",
    fractions=pairs(
        """1/2=un medio | 1/3=un tercio | 2/3=dos tercios | 1/4=un cuarto | 3/4=tres cuartos"""
    ),
    over="sobre",
    scales=nouns(
        """millón=millón/millones | millones=millón/millones | M=millón/millones
        | mil millones=mil millones/mil millones | mil=mil/mil/"""
    ),
    date="{day} de {month}",
    dated="{date} de {year}",
    day_month=r"(?:\s+de)?\s+",
    hours=Noun("hora", "horas", FEMININE),
    clock="{hour} y {minute}",
    full_hour="{hour} {hours}",
    clock_unit=r"h(?:s|rs|oras?)?(?:\b|(?=\d))",
    ordinal_ending=r"\.?(?:(º|ª|er)(?!\w)|°(?=\s[a-z]{4})|(ro|ra|do|da|to|ta|mo|ma|vo|va|no|na)\b)",
    ordinal=_ordinal,
    abbreviations=pairs(
        """Sr.=señor | Sra.=señora | Srta.=señorita | Sres.=señores | Dr.=doctor | Dra.=doctora
        | D.=don | D.ª=doña | Dña.=doña | Ud.=usted | Uds.=ustedes | p. ej.=por ejemplo
        | n.º=número | nº=número | N.º=número | Nº=número | tel.=teléfono | Tel.=teléfono
        | av.=avenida | Av.=avenida | Avda.=avenida | a. C.=antes de Cristo
        | d. C.=después de Cristo | EE. UU.=Estados Unidos | aprox.=aproximadamente
        | etc.=etcétera"""
    ),
    labels=pairs("""pág.=página | págs.=páginas | art.=artículo | cap.=capítulo | fig.=figura |
        núm.=número | vol.=volumen"""),
    signs=pairs("""²=al cuadrado | ³=al cubo | &=y | @=arroba | +=más | ×=por | ÷=entre
        | ±=más menos | §=sección""")
    | {"=": "igual a"},
    agree=_agree,
    gender_of=_gender_of,
    not_counted=frozenset(
        names("""a al con como cuando de del desde durante e el ella ellos en entre era es está
        fue ha han hasta la las le les lo los menos más me mil ni no nos o para pero por
        porque que se sea ser si sin sobre son su sus también te u un una y ya""")
    ),
    century=r"\b[Ss]iglos?\s(?P<roman>[IVXL]+)\b",
)
