"""Word lists of the `words` environments."""

# ruff: noqa: SIM905 - word lists are read as text

from collections.abc import Sequence

# Short common words; each is one or two tokens for most tokenizers.
WORDS = tuple(
    """
    cat dog sun tree fish milk star book rain bird lamp rock ship wind gold leaf moon sand door coat
    apple arm army art aunt baby back bag ball band bank bar barn base bath beach bean bear bed bee
    beef bell belt bench bike bill boat body bone boot bottle bowl box boy brain branch bread brick bridge brush
    bus bush butter button cable cake camel camp candle candy cane cap car card cave chain chair chalk cheese chest
    chicken child church circle city clay cliff clock cloth cloud clown club coal coast coffee coin comb cook copper cord
    corn corner cotton couch cow crab cream crew crop crow crowd crown cube cup curtain dance dawn day deer desk
    diamond dirt dish doctor doll donkey dragon dream dress drum duck dust eagle ear earth egg elbow engine eye face
    family fan farm farmer father feather fence field finger fire flag flame floor flower flute fog food foot forest fork
    fox frame friend frog fruit game garden gate ghost giant gift girl glass globe glove goat grain grape grass ground
    guest guitar hair hall hammer hand harbor hat hawk head heart hill home honey hood hook horn horse house ice
    ink iron island jacket jar jewel juice kettle key king kitchen kite knee knife knight lake lamb land lane lemon
    letter light lion lip list lock log lunch machine magnet mail map market mask meadow meal meat medal metal mile
    mirror money monkey month mother motor mountain mouse mouth mud music nail name neck needle nest net night noise
    north nose note nurse nut oak ocean office oil onion orange oven owl page paint pan paper park parrot
    party path peach pear pen pencil pepper phone piano picture pie pig pilot pin pine pipe plane plant plate plum
    pocket poet pond pony pool potato prince queen rabbit radio rat ribbon rice ring river road robot roof room root
    rope rose salt school sea seat seed shadow sheep shelf shell shirt shoe shop silk silver sister skin sky sleeve
    snake snow soap sock soil song soup spider spoon spring square stage stair station steam steel stick stone storm story
    stove straw street string sugar suit summer swan table tail tea teacher team tent thread throat thumb ticket tie tiger
    tin toad toe tool tooth tower town toy track train truck tunnel turtle uncle van vase vest village violin voice
    wagon wall watch water wave wax week whale wheat wheel window wine wing winter wolf wood wool word worm year
    """.split()
)


def _pairs(text: str) -> dict[str, str]:
    """Returns "left:right" words as a dict; an underscore stands for a blank."""
    halves = (pair.replace("_", " ").partition(":") for pair in text.split())
    return {left: right for left, _, right in halves}


# Base form and simple past; the spelling most used in the United States.
PAST_TENSE: dict[str, str] = _pairs(
    """
    walk:walked jump:jumped play:played talk:talked look:looked cook:cooked help:helped start:started open:opened call:called
    run:ran eat:ate go:went see:saw take:took write:wrote sing:sang buy:bought think:thought come:came
    begin:began bend:bent bite:bit bleed:bled blow:blew break:broke bring:brought build:built burn:burned catch:caught
    choose:chose climb:climbed close:closed count:counted cry:cried dance:danced dig:dug draw:drew dream:dreamed drink:drank
    drive:drove drop:dropped fall:fell feed:fed feel:felt fight:fought find:found fix:fixed fly:flew forget:forgot
    forgive:forgave freeze:froze get:got give:gave grow:grew hang:hung have:had hear:heard hide:hid hold:held
    hope:hoped hug:hugged join:joined keep:kept kick:kicked kiss:kissed know:knew laugh:laughed lead:led learn:learned
    leave:left lend:lent like:liked listen:listened live:lived lose:lost love:loved make:made mean:meant meet:met
    mix:mixed move:moved need:needed paint:painted pass:passed pay:paid plan:planned plant:planted pull:pulled push:pushed
    reach:reached ride:rode ring:rang rise:rose say:said sell:sold send:sent shake:shook shine:shone shoot:shot
    shout:shouted show:showed sink:sank sit:sat sleep:slept slide:slid smell:smelled smile:smiled speak:spoke spend:spent
    stand:stood stay:stayed steal:stole stick:stuck stop:stopped study:studied swear:swore sweep:swept swim:swam swing:swung
    teach:taught tear:tore tell:told thank:thanked throw:threw touch:touched travel:traveled try:tried turn:turned use:used
    visit:visited wait:waited wake:woke want:wanted wash:washed watch:watched wear:wore win:won wish:wished work:worked
    """
)

# Countries whose capital is the one everybody gives; those whose capital repeats the country's name are left out.
CAPITALS: dict[str, str] = _pairs(
    """
    France:Paris Italy:Rome Spain:Madrid Japan:Tokyo China:Beijing Russia:Moscow Germany:Berlin Egypt:Cairo Greece:Athens
    England:London Austria:Vienna Poland:Warsaw Ireland:Dublin Norway:Oslo Sweden:Stockholm Portugal:Lisbon Finland:Helsinki
    Denmark:Copenhagen Belgium:Brussels Netherlands:Amsterdam Switzerland:Bern Hungary:Budapest Romania:Bucharest Bulgaria:Sofia
    Croatia:Zagreb Serbia:Belgrade Slovenia:Ljubljana Slovakia:Bratislava Ukraine:Kyiv Belarus:Minsk Lithuania:Vilnius
    Latvia:Riga Estonia:Tallinn Iceland:Reykjavik Albania:Tirana Malta:Valletta Cyprus:Nicosia Turkey:Ankara Georgia:Tbilisi
    Armenia:Yerevan Azerbaijan:Baku Iran:Tehran Iraq:Baghdad Syria:Damascus Lebanon:Beirut Jordan:Amman Israel:Jerusalem
    Qatar:Doha Oman:Muscat Yemen:Sanaa Afghanistan:Kabul Pakistan:Islamabad Nepal:Kathmandu Bhutan:Thimphu Bangladesh:Dhaka
    Thailand:Bangkok Vietnam:Hanoi Laos:Vientiane Cambodia:Phnom_Penh Indonesia:Jakarta Philippines:Manila Mongolia:Ulaanbaatar
    Taiwan:Taipei Australia:Canberra Fiji:Suva Canada:Ottawa Cuba:Havana Jamaica:Kingston Haiti:Port-au-Prince
    Bahamas:Nassau Nicaragua:Managua Honduras:Tegucigalpa Colombia:Bogota
    Venezuela:Caracas Ecuador:Quito Peru:Lima Chile:Santiago Argentina:Buenos_Aires Uruguay:Montevideo Paraguay:Asuncion
    Brazil:Brasilia Morocco:Rabat Algeria:Algiers Tunisia:Tunis Libya:Tripoli Sudan:Khartoum Ethiopia:Addis_Ababa Kenya:Nairobi
    Uganda:Kampala Rwanda:Kigali Somalia:Mogadishu Nigeria:Abuja Ghana:Accra Senegal:Dakar Mali:Bamako Niger:Niamey
    Angola:Luanda Zambia:Lusaka Zimbabwe:Harare Namibia:Windhoek Botswana:Gaborone Mozambique:Maputo Madagascar:Antananarivo
    Kazakhstan:Astana Uzbekistan:Tashkent Scotland:Edinburgh Wales:Cardiff
    """
)

_FOOD = "The soup,The pizza,My breakfast,The coffee,The dessert,The pasta".split(",")
_SHOWS = "This film,The play,The concert,The last episode,This novel,The game".split(",")
_THINGS = "This phone,My new laptop,The blender,This jacket,The tent,My old car".split(",")
_PLACES = "The hotel,Our room,The museum,The beach,This shop,The campsite".split(",")
_PEOPLE = "The waiter,Our guide,The driver,The nurse,The clerk,My landlord".split(",")

# Each kind of subject with what may be said well or badly of it.
_POSITIVE = (
    (_FOOD, "was delicious,tasted wonderful,was the best I ever had,was fresh and warm".split(",")),
    (_SHOWS, "was brilliant,made me so happy,was a masterpiece,kept me smiling".split(",")),
    (_THINGS, "works perfectly,was worth every cent,is fantastic,has never let me down".split(",")),
    (_PLACES, "was spotless,was beautiful,was a lovely surprise,is my favorite".split(",")),
    (_PEOPLE, "was very kind,could not have been nicer,did a superb job,was a delight".split(",")),
)
_NEGATIVE = (
    (_FOOD, "was disgusting,tasted awful,was cold and greasy,made me sick".split(",")),
    (_SHOWS, "was a total bore,put me to sleep,was a waste of time,was painfully bad".split(",")),
    (_THINGS, "broke on the first day,was a waste of money,is useless,keeps failing".split(",")),
    (_PLACES, "was filthy,was a nightmare,was ugly and loud,is the worst".split(",")),
    (_PEOPLE, "was very rude,ignored us all evening,did a terrible job,lied to me".split(",")),
)
_POSITIVE_SAYINGS = (
    "I loved every minute|A wonderful film|Best meal in years|Great value|It made me laugh|A brilliant performance|"
    "I would buy it again|Highly recommended|What a great day|I am so grateful|Simply perfect|Five stars from me|"
    "Could not be happier|A joy from start to finish|Everything went smoothly|I will come back soon"
).split("|")
_NEGATIVE_SAYINGS = (
    "A waste of time|The food was cold|It broke after two days|Boring from start to finish|I want my money back|"
    "The plot made no sense|Terrible acting|Never again|What a horrible day|I am so disappointed|Simply dreadful|"
    "One star is too many|Could not be worse|A mess from start to finish|Everything went wrong|I will never come back"
).split("|")


def _sentences(parts: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[str]:
    return [f"{subject} {predicate}" for subjects, predicates in parts for subject in subjects for predicate in predicates]


SENTIMENT = tuple(
    [(sentence, "positive") for sentence in _POSITIVE_SAYINGS + _sentences(_POSITIVE)]
    + [(sentence, "negative") for sentence in _NEGATIVE_SAYINGS + _sentences(_NEGATIVE)]
)
