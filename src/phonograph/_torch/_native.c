/* What a replay asks, asked of memory.
 *
 * Whatever is not as it was is Python's to judge. But in a steady loop all is as it was, and to see that takes no more than a
 * comparison of words: the value of a variable is the very object that it was, a counter stands where it stood. So where Python
 * has once answered a question, and said which facts its answer rests on, `Known` looks at these facts, and asks again where one
 * is another. `Facts` are those; no answer comes from them but "as before".
 *
 * Of a tensor that nobody has touched, the bytes that torch keeps about it are what they were: `Standing` compares these.
 *
 * Nothing of torch is included here. Where the bytes lie, `native.py` finds out when it is imported, by changing tensors and
 * looking; where it cannot tell, none of this is used.
 *
 *     the object of Python's  ->  the implementation  ->  the storage
 *                                                     ->  what autograd knows of it, if anything
 *                                                     ->  the counter of its versions, shared by its views
 */
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "others could change a tensor while it is looked at"
#endif

/* -- Tensors */

/* Some bytes of an object: where they begin in it, and how many. */
typedef struct { Py_ssize_t from, many; } Span;

static struct {
    Py_ssize_t impl;                    /* in the object of Python's: where the reference to the implementation lies */
    Py_ssize_t storage, meta, version;  /* in the implementation: the references to the others */
    Py_ssize_t count;                   /* in the counter: the number */
    Span of_impl, of_storage;           /* what is compared */
    Span of_meta[2];                    /* (between these two lies the gradient, which is somebody else's question) */
} lies;

static PyObject *kinds;       /* torch's own classes of tensors, whose objects are laid out so */
static PyObject *any_tensor;  /* the class of all tensors */
static PyObject *torchs_bump; /* what moves versions in torch */

static inline char *reference(const void *in, Py_ssize_t at) { return *(char *const *)((const char *)in + at); }

static int is_plain(PyObject *t) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++)
        if ((PyObject *)Py_TYPE(t) == PyTuple_GET_ITEM(kinds, i)) return 1;
    return 0;
}

/* What is noted of one tensor: this, and after it the bytes of its parts, one span after the other. */
typedef struct { PyObject *tensor; PyTypeObject *kind; char *impl; } Head;

static Py_ssize_t noted_bytes(void) {
    return sizeof(Head) + lies.of_impl.many + lies.of_storage.many + lies.of_meta[0].many + lies.of_meta[1].many;
}

static char *note_span(char *into, const char *object, Span span) {
    memcpy(into, object + span.from, span.many);
    return into + span.many;
}

static void note(PyObject *t, char *into) {
    Head head = {t, Py_TYPE(t), reference(t, lies.impl)};
    memcpy(into, &head, sizeof head);
    into = note_span(into + sizeof head, head.impl, lies.of_impl);
    into = note_span(into, reference(head.impl, lies.storage), lies.of_storage);
    char *meta = reference(head.impl, lies.meta);
    for (int i = 0; meta && i < 2; i++) into = note_span(into, meta, lies.of_meta[i]);
}

static int same_span(const char **was, const char *object, Span span) {
    const char *before = *was;
    *was += span.many;
    return !memcmp(before, object + span.from, span.many);
}

/* Whether all of it is as noted. Each reference is followed only when it is known to be what it was: then what it leads to is
 * there, because it is held by what has just been looked at. */
static int stands(PyObject *t, const char *was) {
    Head head;
    memcpy(&head, was, sizeof head);
    if (t != head.tensor || Py_TYPE(t) != head.kind || reference(t, lies.impl) != head.impl) return 0;
    was += sizeof head;
    if (!same_span(&was, head.impl, lies.of_impl)) return 0;
    if (!same_span(&was, reference(head.impl, lies.storage), lies.of_storage)) return 0;
    char *meta = reference(head.impl, lies.meta);
    for (int i = 0; meta && i < 2; i++)
        if (!same_span(&was, meta, lies.of_meta[i])) return 0;
    return 1;
}

/* Standing(ask, of_one): `ask`, a function of a list of tensors that says whether they are as they have to be, and is asked only
 * where one of them is not what it was when it said yes. It may depend on nothing but the tensors, not on what they hold, and on
 * the state of the thread: that shows in any of them, so the first one is given to `of_one` each time. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *ask, *of_one;
    Py_ssize_t many;              /* tensors that are noted; -1: none are */
    char *noted;
    unsigned long long asked;     /* how often Python was */
} Standing;

static int all_stand(Standing *self, PyObject *tensors) {
    if (PyList_GET_SIZE(tensors) != self->many) return 0;
    Py_ssize_t size = noted_bytes();
    for (Py_ssize_t i = 0; i < self->many; i++)
        if (!stands(PyList_GET_ITEM(tensors, i), self->noted + i * size)) return 0;
    return 1;
}

/* Whether there is something to note of it: a sparse tensor, or one that stands for others, has no storage. */
static int can_be_noted(PyObject *t) {
    return is_plain(t) && reference(reference(t, lies.impl), lies.storage);
}

/* Note them as they are now, in memory of its own: NULL (without an exception) if they cannot be noted. */
static char *note_all(PyObject *tensors) {
    Py_ssize_t many = PyList_GET_SIZE(tensors), size = noted_bytes();
    for (Py_ssize_t i = 0; i < many; i++)
        if (!can_be_noted(PyList_GET_ITEM(tensors, i))) return NULL;
    char *noted = PyMem_Calloc(many ? many : 1, size);
    for (Py_ssize_t i = 0; noted && i < many; i++) note(PyList_GET_ITEM(tensors, i), noted + i * size);
    return noted;
}

/* What is noted is what was there before Python was asked: whatever changes meanwhile is another then. */
static PyObject *ask_python(Standing *self, PyObject *tensors) {
    Py_ssize_t many = PyList_GET_SIZE(tensors);
    char *noted = note_all(tensors);
    self->many = -1;
    self->asked++;
    PyObject *answer = PyObject_CallOneArg(self->ask, tensors);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    if (yes == 1 && noted) {
        PyMem_Free(self->noted);
        self->noted = noted;
        self->many = many;
    } else {
        PyMem_Free(noted);
    }
    if (yes < 0) Py_CLEAR(answer);
    return answer;
}

static PyObject *standing_call(PyObject *of, PyObject *const *args, size_t nargs, PyObject *names) {
    Standing *self = (Standing *)of;
    if (PyVectorcall_NARGS(nargs) != 1 || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "Standing takes one list of tensors");
        return NULL;
    }
    if (!PyList_CheckExact(args[0])) return PyObject_CallOneArg(self->ask, args[0]);
    if (!all_stand(self, args[0])) return ask_python(self, args[0]);
    if (!self->many) Py_RETURN_TRUE;
    PyObject *first = Py_NewRef(PyList_GET_ITEM(args[0], 0)), *answer = PyObject_CallOneArg(self->of_one, first);
    Py_DECREF(first);
    return answer;
}

static PyObject *standing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *ask, *of_one;
    if (!PyArg_ParseTuple(args, "OO:Standing", &ask, &of_one)) return NULL;
    Standing *self = (Standing *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = standing_call;
    self->ask = Py_NewRef(ask);
    self->of_one = Py_NewRef(of_one);
    self->many = -1;
    return (PyObject *)self;
}

static int standing_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Standing *)self)->ask);
    Py_VISIT(((Standing *)self)->of_one);
    return 0;
}

static int standing_clear(PyObject *self) {
    Py_CLEAR(((Standing *)self)->ask);
    Py_CLEAR(((Standing *)self)->of_one);
    return 0;
}

static void standing_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    standing_clear(self);
    PyMem_Free(((Standing *)self)->noted);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef standing_members[] = {
    {"ask", T_OBJECT_EX, offsetof(Standing, ask), READONLY, "Python's own question."},
    {"asked", T_ULONGLONG, offsetof(Standing, asked), READONLY, "How often that was asked."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject StandingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "phonograph._torch._native.Standing",
    .tp_doc = "A question about tensors that is asked again only where one of them is not what it was.",
    .tp_basicsize = sizeof(Standing),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = standing_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Standing, call),
    .tp_traverse = standing_traverse,
    .tp_clear = standing_clear,
    .tp_dealloc = standing_dealloc,
    .tp_members = standing_members,
};

/* -- Facts */

typedef enum { ITEM, PLACE, ITEMS, CELL, FUNCTION, WORD, VERSION, CALLED, READ } Kind;

static const char *const KINDS[] = {"item", "place", "items", "cell", "function", "word", "version", "called", "read", NULL};

/* One fact: what is looked at (`of`, and the `key` or argument that goes with it), and what was there. A `place` has the address
 * of what was there, and does not keep it: who counts references to it would find one too many. */
typedef struct {
    Kind kind;
    PyObject *of, *key, *was;
    uint64_t word;
    const uint64_t *at; /* where a version lies, as long as there is the dictionary */
} Fact;

typedef struct {
    PyObject_HEAD
    Py_ssize_t many;
    Fact *facts;
} Facts;

/* Where a number lies that moves on with each change of a dictionary: up to Python 3.11 in the dictionary itself. From then on
 * whoever wants to hear of changes watches it, and counts. NULL with an exception. */
#if PY_VERSION_HEX < 0x030C0000

static const uint64_t *version_in(PyObject *dictionary) { return &((PyDictObject *)dictionary)->ma_version_tag; }

static int hears(void) { return 1; }

#else

typedef struct Watched { PyObject *dictionary; uint64_t changes; struct Watched *next; } Watched;

static Watched *watched[1 << 12]; /* by address; what lies at one place makes a list */
static int watcher = -1;

static Watched **watched_at(PyObject *dictionary) {
    Watched **at = &watched[((uintptr_t)dictionary >> 4) % (sizeof watched / sizeof *watched)];
    while (*at && (*at)->dictionary != dictionary) at = &(*at)->next;
    return at;
}

/* Python is about to change a dictionary that is watched, or to free it. */
static int hear(PyDict_WatchEvent event, PyObject *dictionary, PyObject *key, PyObject *value) {
    Watched **at = watched_at(dictionary), *one = *at;
    if (!one) return 0;
    one->changes++;
    if (event == PyDict_EVENT_DEALLOCATED) {
        *at = one->next;
        PyMem_RawFree(one);
    }
    return 0;
}

static const uint64_t *version_in(PyObject *dictionary) {
    Watched **at = watched_at(dictionary);
    if (*at) return &(*at)->changes;
    Watched *one = PyMem_RawCalloc(1, sizeof *one);
    if (!one) return (const uint64_t *)PyErr_NoMemory();
    if (PyDict_Watch(watcher, dictionary) < 0) {
        PyMem_RawFree(one);
        return NULL;
    }
    one->dictionary = dictionary;
    *at = one;
    return &one->changes;
}

static int hears(void) {
    if (watcher < 0) watcher = PyDict_AddWatcher(hear); /* others may have all that there are */
    if (watcher < 0) PyErr_Clear();
    return watcher >= 0;
}

#endif

static uint64_t word_at(PyObject *address) {
    return *(volatile uint64_t *)PyLong_AsVoidPtr(address);
}

static PyObject *parts_of(PyObject *function) {
    PyObject *defaults = PyFunction_GET_DEFAULTS(function), *named = PyFunction_GET_KW_DEFAULTS(function);
    return PyTuple_Pack(3, PyFunction_GET_CODE(function), defaults ? defaults : Py_None, named ? named : Py_None);
}

static uint64_t attributes_of(PyObject *function) {
    PyObject *own = ((PyFunctionObject *)function)->func_dict;
    return own ? (uint64_t)PyDict_GET_SIZE(own) : 0;
}

/* Note what is there now: 0, or -1 with an exception. */
static int take_fact(Fact *fact) {
    switch (fact->kind) {
    case ITEM:
        fact->was = Py_XNewRef(PyDict_GetItemWithError(fact->of, fact->key));
        break;
    case PLACE:
        fact->word = (uint64_t)(uintptr_t)PyDict_GetItemWithError(fact->of, fact->key);
        break;
    case ITEMS:
        fact->was = PyList_AsTuple(fact->of);
        break;
    case CELL:
        fact->was = Py_XNewRef(PyCell_GET(fact->of));
        break;
    case FUNCTION:
        fact->was = parts_of(fact->of);
        fact->word = attributes_of(fact->of);
        break;
    case WORD:
        fact->word = word_at(fact->key);
        break;
    case VERSION:
        fact->at = version_in(fact->of);
        fact->word = fact->at ? *fact->at : 0;
        break;
    case CALLED: /* what it has to give was said */
        break;
    case READ:
        fact->was = PyObject_CallNoArgs(fact->of);
        if (fact->was && !PyTuple_CheckExact(fact->was)) PyErr_SetString(PyExc_TypeError, "a reading is a tuple");
        break;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int same_items(PyObject *const *items, Py_ssize_t many, PyObject *was) {
    if (many != PyTuple_GET_SIZE(was)) return 0;
    for (Py_ssize_t i = 0; i < many; i++)
        if (items[i] != PyTuple_GET_ITEM(was, i)) return 0;
    return 1;
}

static int same_parts(PyObject *function, PyObject *was) {
    PyObject *defaults = PyFunction_GET_DEFAULTS(function), *named = PyFunction_GET_KW_DEFAULTS(function);
    PyObject *now[] = {PyFunction_GET_CODE(function), defaults ? defaults : Py_None, named ? named : Py_None};
    return same_items(now, 3, was);
}

static int same_call(const Fact *fact) {
    PyObject *now = fact->key ? PyObject_CallOneArg(fact->of, fact->key) : PyObject_CallNoArgs(fact->of);
    Py_XDECREF(now);
    return now ? now == fact->was : -1;
}

static int same_reading(const Fact *fact) {
    PyObject *now = PyObject_CallNoArgs(fact->of);
    if (!now) return -1;
    int same = PyTuple_CheckExact(now) && same_items(&PyTuple_GET_ITEM(now, 0), PyTuple_GET_SIZE(now), fact->was);
    Py_DECREF(now);
    return same;
}

/* Whether a fact is what it was: 1 or 0, or -1 with an exception. */
static int is_so(const Fact *fact) {
    PyObject *now;
    switch (fact->kind) {
    case ITEM:
        now = PyDict_GetItemWithError(fact->of, fact->key);
        return now || !PyErr_Occurred() ? now == fact->was : -1;
    case PLACE:
        now = PyDict_GetItemWithError(fact->of, fact->key);
        return now || !PyErr_Occurred() ? (uint64_t)(uintptr_t)now == fact->word : -1;
    case ITEMS:
        return same_items(((PyListObject *)fact->of)->ob_item, PyList_GET_SIZE(fact->of), fact->was);
    case CELL:
        return PyCell_GET(fact->of) == fact->was;
    case FUNCTION:
        return attributes_of(fact->of) == fact->word && same_parts(fact->of, fact->was);
    case WORD:
        return word_at(fact->key) == fact->word;
    case VERSION:
        return *fact->at == fact->word;
    case CALLED:
        return same_call(fact);
    case READ:
        return same_reading(fact);
    }
    return 0;
}

/* Whether all are; what comes last takes longest. */
static int are_so(Facts *self) {
    for (Py_ssize_t i = 0; i < self->many; i++) {
        int so = is_so(&self->facts[i]);
        if (so != 1) return so;
    }
    return 1;
}

static int fits_kind(Kind kind, PyObject *of, PyObject *key) {
    switch (kind) {
    case ITEM:
    case PLACE: return PyDict_CheckExact(of) && key && PyUnicode_CheckExact(key);
    case ITEMS: return PyList_CheckExact(of);
    case CELL: return PyCell_Check(of);
    case FUNCTION: return PyFunction_Check(of);
    case WORD: return key && PyLong_CheckExact(key);
    case VERSION: return PyDict_Check(of) && hears();
    case CALLED:
    case READ: return PyCallable_Check(of);
    }
    return 0;
}

/* A fact as Python tells it: (kind, of), (kind, of, key); of what is called: ("called", of, result), ("called", of, argument,
 * result). */
static int make_fact(Fact *fact, PyObject *told) {
    const char *name;
    PyObject *of, *key = NULL, *last = NULL;
    if (!PyTuple_Check(told)) {
        PyErr_SetString(PyExc_TypeError, "a fact is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(told, "sO|OO:fact", &name, &of, &key, &last)) return -1;
    int kind = 0;
    while (KINDS[kind] && strcmp(KINDS[kind], name)) kind++;
    if (kind == CALLED && !last) last = key, key = NULL;
    if (!KINDS[kind] || !fits_kind(kind, of, key) || (kind == CALLED) != (last != NULL)) {
        PyErr_Format(PyExc_TypeError, "there is no such fact: %R", told);
        return -1;
    }
    *fact = (Fact){kind, Py_NewRef(of), Py_XNewRef(key), Py_XNewRef(last), 0, NULL};
    return take_fact(fact);
}

static PyObject *facts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *told;
    if (!PyArg_ParseTuple(args, "O!:Facts", &PyList_Type, &told)) return NULL;
    Facts *self = (Facts *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->facts = PyMem_Calloc(PyList_GET_SIZE(told) + 1, sizeof(Fact));
    Py_ssize_t room = self->facts ? PyList_GET_SIZE(told) : 0;
    if (!self->facts) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < room && i < PyList_GET_SIZE(told); i++) {
        self->many++;
        if (make_fact(&self->facts[i], PyList_GET_ITEM(told, i)) < 0) break;
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *facts_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    int so = are_so((Facts *)self);
    return so < 0 ? NULL : PyBool_FromLong(so);
}

static int facts_traverse(PyObject *of, visitproc visit, void *arg) {
    Facts *self = (Facts *)of;
    for (Py_ssize_t i = 0; i < self->many; i++) {
        Py_VISIT(self->facts[i].of);
        Py_VISIT(self->facts[i].key);
        Py_VISIT(self->facts[i].was);
    }
    return 0;
}

static int facts_clear(PyObject *of) {
    Facts *self = (Facts *)of;
    while (self->many) {
        Fact *last = &self->facts[--self->many];
        Py_CLEAR(last->of);
        Py_CLEAR(last->key);
        Py_CLEAR(last->was);
    }
    return 0;
}

static void facts_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    facts_clear(self);
    PyMem_Free(((Facts *)self)->facts);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject FactsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "phonograph._torch._native.Facts",
    .tp_doc = "Facts as they are now; called, whether they still are so.",
    .tp_basicsize = sizeof(Facts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = facts_new,
    .tp_call = facts_call,
    .tp_traverse = facts_traverse,
    .tp_clear = facts_clear,
    .tp_dealloc = facts_dealloc,
};

/* -- Known(ask, tell, usual): a question of Python's, `ask`, whose `usual` answer rests on the facts that `tell` gives as a list,
 * or None if it rests on more at the moment. When it has been that answer a few times, the facts are taken, and Python is asked
 * once more: what changes in between is heard at the next call. From then on they are looked at, until one is another. Where
 * that happens soon each time, it is tried ever more seldom. */

enum { SOON = 8, FIRST = 2, SELDOM = 1024 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *ask, *tell, *usual;
    Facts *facts;                     /* NULL: Python is asked */
    int wait, pause;                  /* usual answers until facts are taken, this time and at the last */
    unsigned long long asked, stood;  /* how often Python was asked, and how often the present facts were so */
} Known;

static void wait_longer(Known *self, int came_soon) {
    self->pause = !came_soon ? FIRST : self->pause < SELDOM ? 2 * self->pause : SELDOM;
    self->wait = self->pause;
    self->stood = 0;
}

static PyObject *asked(Known *self) {
    self->asked++;
    return PyObject_CallNoArgs(self->ask);
}

/* Take the facts, and give the answer that Python then gives. (What it has answered stands where there are none.) */
static PyObject *learnt(Known *self) {
    wait_longer(self, 1);
    PyObject *told = PyObject_CallNoArgs(self->tell);
    if (!told) return NULL;
    PyObject *facts = told == Py_None ? NULL : PyObject_CallOneArg((PyObject *)&FactsType, told);
    Py_DECREF(told);
    if (!facts) return told == Py_None ? Py_NewRef(self->usual) : NULL;
    PyObject *answer = asked(self);
    if (answer == self->usual) Py_XSETREF(self->facts, (Facts *)Py_NewRef(facts));
    Py_DECREF(facts);
    return answer;
}

static PyObject *known_call(PyObject *of, PyObject *const *args, size_t nargs, PyObject *names) {
    Known *self = (Known *)of;
    if (self->facts) {
        Facts *facts = (Facts *)Py_NewRef(self->facts); /* what is called may come back here */
        int so = are_so(facts);
        Py_DECREF(facts);
        if (so < 0) return NULL;
        if (so) {
            self->stood++;
            return Py_NewRef(self->usual);
        }
        Py_CLEAR(self->facts);
        wait_longer(self, self->stood < SOON);
    }
    PyObject *answer = asked(self);
    if (answer != self->usual || --self->wait > 0) return answer;
    Py_DECREF(answer);
    return learnt(self);
}

static PyObject *known_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *ask, *tell, *usual;
    if (!PyArg_ParseTuple(args, "OOO:Known", &ask, &tell, &usual)) return NULL;
    Known *self = (Known *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = known_call;
    self->ask = Py_NewRef(ask);
    self->tell = Py_NewRef(tell);
    self->usual = Py_NewRef(usual);
    self->wait = self->pause = FIRST;
    return (PyObject *)self;
}

static int known_traverse(PyObject *of, visitproc visit, void *arg) {
    Known *self = (Known *)of;
    Py_VISIT(self->ask);
    Py_VISIT(self->tell);
    Py_VISIT(self->usual);
    Py_VISIT(self->facts);
    return 0;
}

static int known_clear(PyObject *of) {
    Known *self = (Known *)of;
    Py_CLEAR(self->ask);
    Py_CLEAR(self->tell);
    Py_CLEAR(self->usual);
    Py_CLEAR(self->facts);
    return 0;
}

static void known_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    known_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef known_members[] = {
    {"ask", T_OBJECT_EX, offsetof(Known, ask), READONLY, "Python's own question."},
    {"facts", T_OBJECT, offsetof(Known, facts), READONLY, "What its usual answer rests on; None while Python is asked."},
    {"asked", T_ULONGLONG, offsetof(Known, asked), READONLY, "How often Python was asked."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject KnownType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "phonograph._torch._native.Known",
    .tp_doc = "A question that is asked again only where a fact is not what it was.",
    .tp_basicsize = sizeof(Known),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = known_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Known, call),
    .tp_traverse = known_traverse,
    .tp_clear = known_clear,
    .tp_dealloc = known_dealloc,
    .tp_members = known_members,
};

/* -- Versions */

/* Move the version of a tensor on by one, as torch does: 1. Where it has none, or is no tensor, torch says what that means: 0. */
static int bumped(PyObject *t) {
    if (!is_plain(t) && !PyObject_TypeCheck(t, (PyTypeObject *)any_tensor)) return 0;
    char *counter = reference(reference(t, lies.impl), lies.version);
    if (!counter) return 0;
    __atomic_fetch_add((uint32_t *)(counter + lies.count), 1, __ATOMIC_SEQ_CST);
    return 1;
}

static PyObject *bump(PyObject *module, PyObject *tensors) {
    PyObject *all = PySequence_Fast(tensors, "bump takes a list of tensors");
    if (!all) return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all); i++) {
        PyObject *t = PySequence_Fast_GET_ITEM(all, i);
        if (bumped(t)) continue;
        PyObject *alone = PyTuple_Pack(1, t), *done = alone ? PyObject_CallOneArg(torchs_bump, alone) : NULL;
        Py_XDECREF(alone);
        if (!done) {
            Py_DECREF(all);
            return NULL;
        }
        Py_DECREF(done);
    }
    Py_DECREF(all);
    Py_RETURN_NONE;
}

static PyObject *set_up(PyObject *module, PyObject *args) {
    PyObject *own, *tensor, *torchs;
    if (!PyArg_ParseTuple(args, "O!OOnnnnn(nn)(nn)(nn)(nn):set_up", &PyTuple_Type, &own, &tensor, &torchs,
                          &lies.impl, &lies.storage, &lies.meta, &lies.version, &lies.count,
                          &lies.of_impl.from, &lies.of_impl.many, &lies.of_storage.from, &lies.of_storage.many,
                          &lies.of_meta[0].from, &lies.of_meta[0].many, &lies.of_meta[1].from, &lies.of_meta[1].many))
        return NULL;
    if (!PyType_Check(tensor)) {
        PyErr_SetString(PyExc_TypeError, "set_up takes a class of tensors");
        return NULL;
    }
    Py_XSETREF(kinds, Py_NewRef(own));
    Py_XSETREF(any_tensor, Py_NewRef(tensor));
    Py_XSETREF(torchs_bump, Py_NewRef(torchs));
    Py_RETURN_NONE;
}

static PyObject *version(PyObject *module, PyObject *dictionary) {
    if (!fits_kind(VERSION, dictionary, NULL)) return PyErr_Format(PyExc_TypeError, "no version is known of %R", dictionary);
    const uint64_t *at = version_in(dictionary);
    return at ? PyLong_FromUnsignedLongLong(*at) : NULL;
}

static PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "Say where everything lies. Before that, nothing else may be called."},
    {"bump", bump, METH_O, "Move the version counters of tensors on."},
    {"version", version, METH_O, "A number that is another one after each change of a dictionary, if `tells_versions`."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "What a replay asks of many tensors.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyTypeObject *types[] = {&StandingType, &FactsType, &KnownType};
    PyObject *made = PyModule_Create(&module);
    for (int i = 0; made && i < 3; i++)
        if (PyModule_AddType(made, types[i]) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "tells_versions", hears()) < 0) Py_CLEAR(made);
    return made;
}
